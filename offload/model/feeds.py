"""The number of feeds among which a run divides its ranks and cores: one hub process hands out only so many blocks a second.

Where it stops: :mod:`offload.train.hub.division` says which ranks and cores each feed has, and :mod:`offload.train.hub.feeds` runs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offload.model.blocks import HUB_BLOCK_S, block_rows, hub_slowdown, most_block_bytes
from offload.model.overlap import Floats

FEED_BUSY = 0.7  # of its time: blocks come in bursts, and a call that waits for a busy feed holds up its rank
# A feed is a process, and ranks train in step with the slowest feed's. On fewer cores, each of them tells: one that others use, or that is
# slow, holds up the whole run.
FEED_CORES = 32
MOST_FEEDS = 16  # all on the driver's host, where each may take more than a core

USUAL_CORE_SECONDS, USUAL_BYTES = 0.008, 150_552.0
"""The assumed cost of a sample before any is measured: an augmented JPEG of 224 × 224 pixels."""


def feed_share(
    feeds: ArrayLike,
    *,
    core_seconds: float,
    sample_bytes: float,
    cores: ArrayLike,
    store_bytes: ArrayLike,
    workers: ArrayLike,
    local_batch_size: ArrayLike = 1,
    block_s: float = HUB_BLOCK_S,
) -> Floats:
    """The share of the time in which each of so many feeds is busy while all cores are, over broadcast arrays; above 1, they keep the cores
    waiting. ``block_s``: see :class:`offload.model.input_rate.InputRate`."""
    number, all_cores = np.asarray(feeds, dtype=float), np.asarray(cores, dtype=float)
    own = all_cores / number
    # Each feed has its share of a node's object store, so that blocks are as large as with one feed.
    rows = block_rows(core_seconds, sample_bytes, own, most_block_bytes(store_bytes, all_cores), local_batch_size)
    blocks_per_s = own / (core_seconds * rows)
    return np.asarray(blocks_per_s * block_s * hub_slowdown(np.asarray(workers, dtype=float) / number))


def feeds_needed(
    *,
    core_seconds: float,
    sample_bytes: float,
    cores: ArrayLike,
    store_bytes: ArrayLike,
    workers: ArrayLike,
    local_batch_size: ArrayLike = 1,
    block_s: float = HUB_BLOCK_S,
) -> NDArray[np.int64]:
    """The fewest feeds that are busy for :data:`FEED_BUSY` of the time at most, over broadcast arrays. There are never more than workers,
    and never so many that one had fewer than :data:`FEED_CORES` cores."""
    needed: NDArray[np.int64] = np.full((), MOST_FEEDS)
    for feeds in range(MOST_FEEDS, 0, -1):
        share = feed_share(
            feeds,
            core_seconds=core_seconds,
            sample_bytes=sample_bytes,
            cores=cores,
            store_bytes=store_bytes,
            workers=workers,
            local_batch_size=local_batch_size,
            block_s=block_s,
        )
        needed = np.where(share <= FEED_BUSY, feeds, needed)
    most = np.minimum(np.floor(np.asarray(cores, dtype=float) / FEED_CORES), np.asarray(workers, dtype=float))
    return np.asarray(np.clip(needed, 1, np.maximum(most, 1)).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class FeedRule:
    """The number of feeds of a run. ``most``: 1 if its data cannot be divided; ``least``: for tests, on few cores."""

    least: int = 1
    most: int = MOST_FEEDS

    def feeds(
        self,
        *,
        cores: int,
        workers: int,
        store_bytes: float,
        cost: tuple[float, float] | None = None,
        local_batch_size: int = 1,
    ) -> int:
        """The number of feeds for so many cores and workers. ``cost``: the measured core-seconds and bytes of a sample, if any is."""
        most = min(self.most, cores, workers)
        if most < 2 or max(self.least, cores // FEED_CORES) < 2:
            return 1
        core_seconds, sample_bytes = cost or (USUAL_CORE_SECONDS, USUAL_BYTES)
        if not math.isfinite(core_seconds):  # nobody has made a sample here: all came from other runs
            core_seconds = USUAL_CORE_SECONDS
        needed = feeds_needed(
            core_seconds=max(core_seconds, 1e-9),
            sample_bytes=sample_bytes,
            cores=cores,
            store_bytes=store_bytes,
            workers=workers,
            local_batch_size=local_batch_size,
        )
        return min(max(int(needed), self.least), most)


ONE_FEED = FeedRule(most=1)
"""The hub alone feeds the run."""
