"""How many rows each preprocessing task gets. Pure: what is left and what was measured in, row counts out.

Three wishes pull apart. The first batch should come soon (small tasks). A task costs a millisecond or two beside its work
(long tasks, sized in seconds of measured work). Near the end of a pass no core should wait for the last long task of
another (small tasks again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TASK_S = 1.0
LONGEST_TASK_S = 3.0  # to make a local batch whole
BLOCK_BYTES = 128 << 20
SAME_SPEED = 0.25  # by which equal cores may differ
PLAN_TASKS_PER_CORE = 8  # tasks in one plan; the next plan uses newer measurements


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one sample costs, measured: seconds of one core (busy CPU time of the tasks) and bytes as shipped."""

    core_seconds_per_sample: float
    bytes_per_sample: float


def block_bytes(store_bytes: float, cores: int) -> int:
    """The largest block worth making: ``BLOCK_BYTES``, less where a small object store could not hold a dozen a core."""
    return int(min(BLOCK_BYTES, max(1 << 20, store_bytes / (12 * cores))))


def plan_tasks(
    remaining: int,
    *,
    cores: int,
    first_rows: int,
    rates: Rates | None,
    block_bytes: int = BLOCK_BYTES,
    local_batch_size: int = 1,
) -> list[int]:
    """Row counts of the next tasks, in order; their sum is at most ``remaining``.

    ``first_rows``: rows that make the first global batch. Before anything is measured each task is one core's share of
    it. Full tasks hold whole local batches where they can, so that most of a worker's batches lie within one block and
    need no copy. The caller plans again when these are issued.
    """
    if remaining <= 0:
        return []
    if rates is None:
        sizes = [max(1, math.ceil(first_rows / cores))] * cores
    else:
        full = _whole_batches(rates, block_bytes, local_batch_size)
        count = PLAN_TASKS_PER_CORE * cores
        sizes = _tapered(remaining, full, cores) if remaining <= count * full else [full] * count
    return _clip(sizes, remaining)


def aligned(size: int, rows: int, local_batch_size: int) -> int:
    """``size`` less what it takes for a rank that has ``rows`` rows so far to have whole local batches again: the tasks
    before anything was measured leave it with part of one."""
    return size - rows % local_batch_size if size >= local_batch_size else size


def for_speed(size: int, speed: float, local_batch_size: int) -> int:
    """``size`` for a core that is ``speed`` times as fast as the cluster's fastest. A much slower core gets less, or
    the blocks behind it would wait; it gets whole local batches where one fits."""
    if speed > 1 - SAME_SPEED:
        return size
    rows = max(1, int(size * speed))
    return rows - rows % local_batch_size if rows >= local_batch_size else rows


def rows_per_task(rates: Rates, block_bytes: int = BLOCK_BYTES) -> int:
    """Rows that take ``TASK_S`` of one core, unless their block would outgrow ``block_bytes``; at least one."""
    by_time = TASK_S / max(rates.core_seconds_per_sample, 1e-9)
    by_size = block_bytes / max(rates.bytes_per_sample, 1.0)
    return max(1, int(min(by_time, by_size)))


def _whole_batches(rates: Rates, block_bytes: int, local_batch_size: int) -> int:
    """Rows of a full task: as many local batches as fit; part of one where it would take too long or be too large."""
    rows = rows_per_task(rates, block_bytes)
    if rows >= local_batch_size:
        return rows - rows % local_batch_size
    whole_s, whole_bytes = (local_batch_size * each for each in (rates.core_seconds_per_sample, rates.bytes_per_sample))
    return local_batch_size if whole_s <= LONGEST_TASK_S and whole_bytes <= block_bytes else rows


def _tapered(remaining: int, full: int, cores: int) -> list[int]:
    """Full tasks, then ever smaller ones: each half of an equal share of what is left, down to a quarter task."""
    sizes: list[int] = []
    least = max(1, full // 4)
    while remaining > 0:
        size = min(full, max(least, remaining // (2 * cores)), remaining)
        sizes.append(size)
        remaining -= size
    return sizes


def _clip(sizes: list[int], remaining: int) -> list[int]:
    clipped: list[int] = []
    for size in sizes:
        if remaining <= 0:
            break
        clipped.append(min(size, remaining))
        remaining -= size
    return clipped
