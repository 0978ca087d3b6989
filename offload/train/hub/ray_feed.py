"""A feed beside the hub's own, as an actor of Ray on the hub's host. The hub owns it, and Ray ends it with the hub.

This module does not import torch, as the hub's does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from offload.errors import RunError
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed, FeedListener
from offload.pipeline.pool.core_watch import CoreWatch, CpuUser
from offload.pipeline.pool.pool import Pool
from offload.report.events import CoresShared, RunEvent, WaitsForCpus
from offload.train.cluster.holdings import worker_title
from offload.train.hub.actor import collect_seldom, take_turns

PROCESSES = 1 << 16  # of a feed, at most: no two of a run may have the same number


class Preprocessing(CpuUser):
    """The preprocessing of a feed, as the watch for waiting CPUs sees it. ``note`` hears what it says of the run."""

    def __init__(self, feed: Feed, note: Callable[[RunEvent], Any], run: str) -> None:
        self._feed, self._note, self._worker = feed, note, worker_title(run)

    def starving(self) -> str:
        return self._feed.starving()

    def executed(self, what: str) -> bool:
        return self._feed.executed(what)

    def reserves_cores(self) -> bool:
        return self._feed.reserves_cores()

    def stays(self, holder: str) -> bool:
        return holder == self._worker

    def share_cores(self) -> None:
        if self._feed.pool is not None:
            self._feed.pool.share()
            self._note(CoresShared())

    def waits(self, what: str, seconds: float, held: str) -> None:
        self._note(WaitsForCpus(dataset=what, seconds=round(seconds), held=held))

    def waits_in_vain(self, what: str, seconds: float, held: str) -> None:
        self._feed.failed(
            RunError(
                f"the preprocessing of {what!r} has waited {seconds:.0f} s for CPUs that it cannot get while this run trains ({held}). "
                'Let workers reserve fewer CPUs (scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": ...})), let the '
                "Dataset's steps ask for fewer at once (num_cpus, concurrency), or add nodes."
            )
        )


class RayFeed(Feed):
    """See :class:`Feed`. Preprocessing processes report to the hub, as this feed does.

    Args:
        run: the run's name on the cluster.
        hub: the hub's handle.
        number: a number that no other feed of the run has had, from 1.
    """

    def __init__(self, run: str, streams: dict[str, FeedDataset], cores: Cores, hub: Any, number: int) -> None:
        take_turns()
        collect_seldom()
        self._title = f"{run} feed"
        pool = partial(Pool, first=number * PROCESSES)
        super().__init__(streams, cores, pool=pool, handle=hub, listener=_ToHub(hub))
        CoreWatch(Preprocessing(self, hub.note.remote, run)).start()

    def __repr__(self) -> str:
        return self._title


class _ToHub(FeedListener):
    """Passes on to the hub what happens in a feed."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub

    def lost(self, node: str, error: BaseException) -> None:
        self._hub.lost.remote(node, RunError(str(error)))  # Ray's own errors do not all travel

    def works(self, node: str) -> None:
        self._hub.works.remote(node)
