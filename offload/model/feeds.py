"""The number of feeds among which a run divides its ranks and cores: one hub process hands out only so many blocks a second.

Where it stops: :mod:`offload.train.hub.division` says which ranks and cores each feed has, and :mod:`offload.train.hub.feeds` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


def fewest_feeds(busy: Callable[[int], Floats], cores: ArrayLike, workers: ArrayLike) -> NDArray[np.int64]:
    """The fewest feeds of which each is busy for :data:`FEED_BUSY` of the time at most, over broadcast arrays. There are never more than
    workers, nor so many that one had fewer than :data:`FEED_CORES` cores. ``busy``: the share of the time for so many feeds."""
    most = np.minimum(np.floor(np.asarray(cores, dtype=float) / FEED_CORES), np.asarray(workers, dtype=float))
    share = busy(1)
    feeds: NDArray[np.int64] = np.ones(np.broadcast(share, most).shape, dtype=np.int64)
    for more in range(2, int(min(np.max(most, initial=1.0), MOST_FEEDS)) + 1):
        too_busy = (share > FEED_BUSY) & (most >= more)
        if not np.any(too_busy):
            break
        feeds, share = np.where(too_busy, more, feeds), np.where(too_busy, busy(more), share)
    return feeds


def feed_share(
    feeds: int,
    *,
    core_seconds: float,
    sample_bytes: float,
    cores: int,
    store_bytes: float,
    workers: int,
    local: int = 1,
) -> Floats:
    """The share of the time in which each of so many feeds is busy while all cores are; above 1, they keep the cores waiting. ``local``:
    the local batch size."""
    own = cores / feeds
    # Each feed has its share of a node's object store, so that blocks are as large as with one feed.
    rows = block_rows(core_seconds, sample_bytes, own, most_block_bytes(store_bytes, cores), local)
    return np.asarray(own / (core_seconds * rows) * HUB_BLOCK_S * hub_slowdown(workers / feeds))


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
        share = partial(
            feed_share,
            core_seconds=max(core_seconds, 1e-9),
            sample_bytes=sample_bytes,
            cores=cores,
            store_bytes=store_bytes,
            workers=workers,
            local=local_batch_size,
        )
        return min(max(int(fewest_feeds(share, cores, workers)), self.least), most)


ONE_FEED = FeedRule(most=1)
"""The hub alone feeds the run."""
