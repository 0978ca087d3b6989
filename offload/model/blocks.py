"""The size of the blocks in which samples travel, and the rate at which one hub hands them out.

Where it stops: full blocks in a steady state. :mod:`offload.pipeline.feed.sizing` sizes each task of a pass, with the same constants.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from offload.model.overlap import Floats

TASK_S = 1.0  # work of a task of a run, beside which its own cost of a millisecond or two does not matter
# CPU time that the run's hub spends on a block, with 32 workers, and its growth with each doubling of the workers: 4.3 ms with 8 and 5.3 ms
# with 64 (benchmarks/results/scale.json). Beyond that it is extrapolated.
HUB_BLOCK_S, HUB_WORKERS, HUB_DOUBLING = 0.005, 32, 0.07
BLOCK_HUB_S = 2 * HUB_BLOCK_S  # so that one hub, half busy, keeps up
# A task may grow beyond TASK_S up to this, to hold a whole local batch or to make the wait for its first file matter less.
LONGEST_TASK_S = 3.0
BLOCK_BYTES = 128 << 20
LEAST_BLOCK_BYTES = 1 << 20
BLOCKS_PER_CORE = 12  # that an object store holds at least
# On many cores with light samples, blocks of that size would be more than the hub can hand out. They may be so many times as large. A core
# has two tasks, and no more are made while the blocks that wait fill 0.3 of the stores: six blocks for each core are room enough.
HUB_ROOM = 2.0
STORE_SHARE = 0.3  # of a node's memory, for its object store: Ray's own choice


def most_block_bytes(store_bytes: ArrayLike, cores: ArrayLike) -> Floats:
    """The largest useful block: ``BLOCK_BYTES``, or less if an object store could not hold a dozen blocks per core."""
    room = np.asarray(store_bytes, dtype=float) / (BLOCKS_PER_CORE * np.maximum(np.asarray(cores, dtype=float), 1.0))
    return np.asarray(np.clip(room, LEAST_BLOCK_BYTES, BLOCK_BYTES))


def room_with_hub(block_bytes: ArrayLike, core_seconds: float, sample_bytes: float, cores: ArrayLike) -> Floats:
    """The largest useful block where one hub hands out the blocks of so many ``cores``: as large as the half busy hub needs it, but not
    below ``block_bytes``, the usual limit, and at most ``HUB_ROOM`` times that."""
    usual = np.asarray(block_bytes, dtype=float)
    with np.errstate(over="ignore"):
        needed = BLOCK_HUB_S * np.asarray(cores, dtype=float) / max(core_seconds, 1e-9) * sample_bytes
    return np.asarray(np.clip(needed, usual, HUB_ROOM * usual))


def hub_slowdown(workers: ArrayLike) -> Floats:
    """The hub's CPU time of a block with so many workers, relative to that with ``HUB_WORKERS``."""
    doublings = np.log2(np.maximum(np.asarray(workers, dtype=float), 1.0) / HUB_WORKERS)
    return np.asarray(1.0 + HUB_DOUBLING * doublings)


def block_rows(
    core_seconds: float, sample_bytes: float, cores: ArrayLike, block_bytes: ArrayLike, local_batch_size: ArrayLike
) -> Floats:
    """Samples of a full block, at least one, over broadcast arrays.

    A block is the work of a second of a core, and longer beyond 100 cores, unless it would outgrow ``block_bytes``, or what
    :func:`room_with_hub` makes of them. It holds whole local batches if possible.
    """
    seconds = np.maximum(TASK_S, BLOCK_HUB_S * np.asarray(cores, dtype=float))
    room = room_with_hub(block_bytes, core_seconds, sample_bytes, cores)
    rows = np.maximum(np.floor(np.minimum(seconds / core_seconds, room / max(sample_bytes, 1.0))), 1.0)
    local = np.maximum(np.asarray(local_batch_size, dtype=float), 1.0)
    with np.errstate(over="ignore"):  # samples beyond any memory fit nowhere
        fits = (local * core_seconds <= np.maximum(LONGEST_TASK_S, seconds)) & (local * sample_bytes <= room)
    return np.asarray(np.where(rows >= local, rows - rows % local, np.where(fits, local, rows)))
