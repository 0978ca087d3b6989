"""The size of each preprocessing task, in rows for a Trainer, and in whole batches for a DataLoader. Pure: what remains and measurements
in, sizes out.

Three goals conflict. The first batch should come soon (small tasks). A task costs a millisecond or two besides its work (long
tasks, sized in seconds of measured work). Near the end of a pass, no core should wait for the last long task of another (small
tasks again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload.model.blocks import (
    BLOCK_BYTES,
    BLOCK_HUB_S,
    BLOCKS_PER_CORE,
    LEAST_BLOCK_BYTES,
    LONGEST_TASK_S,
    TASK_S,
    room_with_hub,
)

WAITING = 0.03  # the share of a task's time that the wait for its first file may take
SAME_SPEED = 0.25  # relative difference up to which cores count as equally fast
PLAN_TASKS_PER_CORE = 8  # tasks in one plan; the next plan uses newer measurements

# A DataLoader orders only a few batches ahead, one by one, so its tasks are shorter.
BATCH_TASK_S = 0.1  # work of a task, beside which its own cost of a millisecond or two does not matter
FIRST_BATCH_TASK_S = 0.01  # work of a task for which nothing is ahead: the program waits for it
LEAST_BATCH_TASK_S = 0.002  # work of a task that is not worth a division
MOST_BATCHES = 64  # the most batches of a task


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """The measured cost of one sample, from which a task's size follows.

    Args:
        core_seconds_per_sample: seconds of one core, as :attr:`offload.pipeline.pool.task.Cost.work_s` counts them; infinite while nobody
            has made a sample, because others had made all of them before.
        bytes_per_sample: as shipped in a block.
        first_wait_s: the seconds in which a task waits for its first file from storage.
    """

    core_seconds_per_sample: float
    bytes_per_sample: float
    first_wait_s: float = 0.0


def block_bytes(store_bytes: float, cores: int) -> int:
    """The largest useful block: ``BLOCK_BYTES``, or less if a small object store could not hold a dozen blocks per core."""
    return int(min(BLOCK_BYTES, max(LEAST_BLOCK_BYTES, store_bytes / (BLOCKS_PER_CORE * cores))))


def plan_tasks(
    remaining: int,
    *,
    cores: int,
    first_rows: int,
    rates: SampleCost | None,
    block_bytes: int = BLOCK_BYTES,
    local_batch_size: int = 1,
) -> list[int]:
    """Row counts of the next tasks, in order; their sum is at most ``remaining``.

    ``first_rows``: the rows of the first global batch. Before the first measurement, each task is one core's share of it. Full
    tasks hold whole local batches if possible, so that most of a worker's batches lie within one block and need no copy. The caller
    plans again once it has issued these.
    """
    if remaining <= 0:
        return []
    if rates is None or math.isinf(rates.core_seconds_per_sample):
        sizes = [max(1, math.ceil(first_rows / cores))] * cores
    else:
        full = _whole_batches(rates, block_bytes, local_batch_size, cores)
        count = PLAN_TASKS_PER_CORE * cores
        sizes = _tapered(remaining, full, cores) if remaining <= count * full else [full] * count
    return _clip(sizes, remaining)


def aligned(size: int, rows: int, local_batch_size: int) -> int:
    """Trim ``size`` so that a rank with ``rows`` rows so far ends on a batch boundary. The tasks before the first measurement may
    leave it with part of a batch."""
    return size - rows % local_batch_size if size >= local_batch_size else size


def for_speed(size: int, speed: float, local_batch_size: int) -> int:
    """``size`` for a core that is ``speed`` times as fast as the cluster's fastest. A much slower core gets fewer rows, or the
    blocks behind it would wait; it gets whole local batches if at least one fits."""
    if speed > 1 - SAME_SPEED:
        return size
    rows = max(1, int(size * speed))
    return rows - rows % local_batch_size if rows >= local_batch_size else rows


def task_s(cores: int, first_wait_s: float = 0.0) -> float:
    """Seconds of a task's work. On hundreds of cores it is longer, so that one hub, half busy, keeps up with the blocks of all. It is also
    longer where a core has nothing to do until the first file has come from storage."""
    return max(TASK_S, BLOCK_HUB_S * cores, min(first_wait_s / WAITING, LONGEST_TASK_S))


def rows_per_task(rates: SampleCost, block_bytes: int = BLOCK_BYTES, *, cores: int = 1) -> int:
    """Rows that take :func:`task_s` of one core, unless their block would outgrow :func:`block_room`; at least one."""
    by_time = task_s(cores, rates.first_wait_s) / max(rates.core_seconds_per_sample, 1e-9)
    return max(1, int(min(by_time, rows_in(block_room(block_bytes, rates, cores), rates))))


def block_room(block_bytes: int, rates: SampleCost, cores: int) -> float:
    """Bytes of the largest useful block beside so many cores: ``block_bytes``, or more where the hub needs larger ones."""
    return float(room_with_hub(block_bytes, rates.core_seconds_per_sample, max(rates.bytes_per_sample, 1.0), cores))


def rows_in(size_bytes: float, rates: SampleCost) -> float:
    """The rows whose block has so many bytes."""
    return size_bytes / max(rates.bytes_per_sample, 1.0)


def batches_in(seconds: float, batch_s: float | None) -> int:
    """The number of batches that a core makes in this time, if each takes ``batch_s``; 1 before the first measurement."""
    if batch_s is None:
        return 1
    return max(1, min(int(seconds / max(batch_s, 1e-6)), MOST_BATCHES))


def batches_per_task(batch_s: float | None, *, ahead: int, wanted: int, cores: int) -> int:
    """The number of batches of a DataLoader's next task.

    Args:
        batch_s: the work of a batch; None before the first measurement.
        ahead: the batches that are made or under way. While there are few, tasks are short, since the program waits for them.
        wanted: the batches that are ordered and in no task. The last ones are divided among the cores.
        cores: the number of cores.
    """
    soon = max(batches_in(FIRST_BATCH_TASK_S, batch_s), ahead // cores)
    share = max(batches_in(LEAST_BATCH_TASK_S, batch_s), wanted // cores)
    return min(batches_in(BATCH_TASK_S, batch_s), soon, share)


def _whole_batches(rates: SampleCost, block_bytes: int, local_batch_size: int, cores: int) -> int:
    """Rows of a full task: as many local batches as fit, or part of one if a whole one would take too long or be too large."""
    rows = rows_per_task(rates, block_bytes, cores=cores)
    if rows >= local_batch_size:
        return rows - rows % local_batch_size
    whole_s = local_batch_size * rates.core_seconds_per_sample
    whole_bytes = local_batch_size * rates.bytes_per_sample
    fits = whole_s <= max(LONGEST_TASK_S, task_s(cores)) and whole_bytes <= block_room(block_bytes, rates, cores)
    return local_batch_size if fits else rows


def _tapered(remaining: int, full: int, cores: int) -> list[int]:
    """Full tasks, then smaller and smaller ones: each is half of a core's equal share of the rest, but at least a quarter task."""
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
