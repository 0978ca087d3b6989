"""How many rows each preprocessing task gets. Pure: what is left and what was measured in, row counts out.

Three wishes pull apart. The first batch should come soon (small tasks). Ray spends 10-20 ms of CPU on each task and a
core idles between two (long tasks, sized in seconds of measured work). Near the end of a pass no core should wait for
the last long task of another (small tasks again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TASK_S = 2.0  # measured: tasks of 0.5, 1 and 2 s used 78, 87 and 98 % of two cores (one task per core)
BLOCK_BYTES = 96 << 20  # Ray Data's own cost per image falls by half from 9 MB to 77 MB blocks, and no further
SEGMENT_S = 60.0  # how long one plan holds before sizes are taken from newer measurements
MAX_TASKS = 512  # of one plan: each costs the driver a reference and an entry in its queues
RAMP_WAVES = 3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one sample costs, measured: seconds of one core (busy CPU time of the tasks) and bytes as shipped."""

    core_seconds_per_sample: float
    bytes_per_sample: float


def block_bytes(store_bytes: float, cores: int) -> int:
    """The largest block worth making: ``BLOCK_BYTES``, less where a small object store could not hold a dozen a core."""
    return int(min(BLOCK_BYTES, max(1 << 20, store_bytes / (12 * cores))))


def plan_tasks(
    remaining: int, *, cores: int, first_rows: int, rates: Rates | None, block_bytes: int = BLOCK_BYTES
) -> list[int]:
    """Row counts of the next tasks, in order; their sum is at most ``remaining``.

    ``first_rows``: rows that make the first global batch. Before anything is measured a few waves of tasks start from
    that share of one core and double. The caller plans again when these are nearly done.
    """
    if remaining <= 0:
        return []
    if rates is None:
        wave = max(1, math.ceil(first_rows / cores))
        sizes = [wave << doubling for doubling in range(RAMP_WAVES) for _ in range(cores)]
    else:
        full = rows_per_task(rates, block_bytes)
        count = min(MAX_TASKS, max(4 * cores, math.ceil(cores * SEGMENT_S / TASK_S)))
        sizes = _tapered(remaining, full, cores) if remaining <= count * full else [full] * count
    return _clip(sizes, remaining)


def rows_per_task(rates: Rates, block_bytes: int = BLOCK_BYTES) -> int:
    """Rows that take ``TASK_S`` of one core, unless their block would outgrow ``block_bytes``; at least one."""
    by_time = TASK_S / max(rates.core_seconds_per_sample, 1e-9)
    by_size = block_bytes / max(rates.bytes_per_sample, 1.0)
    return max(1, int(min(by_time, by_size)))


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
