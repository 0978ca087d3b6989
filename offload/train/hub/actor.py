"""The hub, the run's only actor beside the driver. It feeds the workers and receives their reports. (Each further process would take
some seconds to start.)

This module imports neither torch nor Ray Train: on a host with few cores, the hub starts beside the workers, which import both.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import ray

from offload.errors import RunError
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed
from offload.pipeline.pool.core_watch import CoreWatch
from offload.pipeline.program.printed import Outlet, Printed
from offload.report.run_tail import Tails, tails_in
from offload.train.cluster.holdings import HUB, worker_title
from offload.train.hub.board import Board
from offload.train.messages import GroupStart

SWITCH_S = 0.0005
"""The time for which a thread of the hub keeps Python's lock while others wait for it, a tenth of Python's default. A worker's call
takes the lock several times. On a large cluster, the pool's thread always has work, and calls that wait five milliseconds each time fall
behind it."""


def take_turns() -> None:
    """Let the threads of this process, a hub, switch often."""
    sys.setswitchinterval(SWITCH_S)


class Hub(Feed, Board):
    """The actor from which workers take batches and to which they report; the driver reads it. Call it through
    :class:`offload.train.hub.client.HubClient`."""

    def __init__(self, streams: dict[str, FeedDataset], cores: Cores, nodes: int, run_dir: Path) -> None:
        take_turns()
        self._run_dir, self._tails = run_dir, tails_in(run_dir)
        Board.__init__(self, self.rates, self.core_counts, self.speeds, self.process_bytes, self.spent, nodes=nodes)
        self._without_cache: set[str] = set()
        self._through_ray: set[str] = set()
        self._outlet, self._passing_on = Outlet(), threading.Lock()
        self._title = ray.get_runtime_context().get_actor_name() or "hub"
        Feed.__init__(self, streams, cores, handle=ray.get_runtime_context().current_actor)
        run = self._title.removesuffix(HUB)
        CoreWatch(
            starving=self.starving,
            executed=self.executed,
            reserves=self.reserves_cores,
            share=self._share_cores,
            say=self._waits_for_cpus,
            never=self._never_gets_cpus,
            stays=lambda what: what == worker_title(run),
        ).start()

    def _share_cores(self) -> None:
        if self.pool is not None:
            self.pool.share()
            self.note("cores_shared")

    def _waits_for_cpus(self, dataset: str, seconds: float, held: str) -> None:
        self.note("waits_for_cpus", dataset=dataset, seconds=round(seconds), held=held)

    def _never_gets_cpus(self, dataset: str, seconds: float, held: str) -> None:
        self.failed(
            RunError(
                f"the preprocessing of {dataset!r} has waited {seconds:.0f} s for CPUs that it cannot get while this run trains ({held}). "
                'Let workers reserve fewer CPUs (scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": ...})), let the '
                "Dataset's steps ask for fewer at once (num_cpus, concurrency), or add nodes."
            )
        )

    def __repr__(self) -> str:
        return self._title

    def run_dir(self) -> Path:
        """The run directory, on this host."""
        return self._run_dir

    def tails(self, offsets: Mapping[str, int]) -> Tails:
        """What the files of the run directory hold from these offsets on, for views on other hosts."""
        return self._tails(offsets)

    def begin_group(self) -> GroupStart:
        """Start a worker group; drop the passes of the previous group."""
        start = super().begin_group()
        self.begin(start.attempt)
        return start

    def lost(self, node: str, error: BaseException) -> None:
        """Report that a preprocessing process died."""
        self.note("preprocessing_lost", node=node, reason=str(error).strip().splitlines()[0])

    def slow(self, node: str, what: str, seconds: float) -> None:
        """Report that a preprocessing process has worked on one sample for a long time."""
        self.note("preprocessing_slow", node=_address(node), what=what, seconds=round(seconds))

    def cache_stopped(self, node: str, reason: str) -> None:
        """Report that a preprocessing process stores nothing more in its node's cache. The first report of a node counts."""
        if node not in self._without_cache:
            self._without_cache.add(node)
            self.note("cache_stopped", node=_address(node), reason=reason)

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """Report that the blocks of a node do not reach the workers directly. The first report of a node counts."""
        if node not in self._through_ray:
            self._through_ray.add(node)
            self.note("blocks_through_ray", node=_address(node), reason=reason)

    def printed(self, key: str, printed: Printed) -> None:
        """Report what a preprocessing process has printed."""
        with self._passing_on:
            self._outlet.put(printed)
            self._pass_on()

    def end_printing(self) -> None:
        """Report how many lines the limit has held back."""
        with self._passing_on:
            self._pass_on(last=True)

    def _pass_on(self, *, last: bool = False) -> None:
        for line in self._outlet.collect(last=last):
            self.note("printed", stream=line.stream, text=line.text)

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """Report that a preprocessing process ends because nothing can interrupt its call."""
        super().given_up(_address(node), what, seconds)

    def works(self, node: str) -> None:
        """Report that a node has begun to preprocess."""
        self.note("node_preprocesses", node=node)


def _address(node_id: str) -> str:
    """The address by which users know a node."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next((str(n["NodeManagerAddress"]) for n in nodes if n["NodeID"] == node_id), node_id)
