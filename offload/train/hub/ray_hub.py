"""The hub as an actor of Ray, which does all at once: each further process that workers wait for would take seconds to start.

This module does not import torch: on a host with few cores, the hub starts beside the workers, which do.
"""

from __future__ import annotations

from pathlib import Path

import ray

from offload.errors import RunError
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed
from offload.pipeline.pool.core_watch import CoreWatch, CpuUser
from offload.report.events import CoresShared, WaitsForCpus
from offload.train.cluster.holdings import HUB, worker_title
from offload.train.hub.actor import Hub, collect_seldom, take_turns
from offload.train.hub.board import Board


class _Preprocessing(CpuUser):
    """The preprocessing of a run, as the watch for waiting CPUs sees it."""

    def __init__(self, feed: Feed, board: Board, run: str) -> None:
        self._feed, self._board, self._worker = feed, board, worker_title(run)

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
            self._board.note(CoresShared())

    def waits(self, what: str, seconds: float, held: str) -> None:
        self._board.note(WaitsForCpus(dataset=what, seconds=round(seconds), held=held))

    def waits_in_vain(self, what: str, seconds: float, held: str) -> None:
        self._feed.failed(
            RunError(
                f"the preprocessing of {what!r} has waited {seconds:.0f} s for CPUs that it cannot get while this run trains ({held}). "
                'Let workers reserve fewer CPUs (scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": ...})), let the '
                "Dataset's steps ask for fewer at once (num_cpus, concurrency), or add nodes."
            )
        )


class RayHub(Hub):
    """See :class:`Hub`."""

    def __init__(self, streams: dict[str, FeedDataset], cores: Cores, nodes: int, run_dir: Path) -> None:
        take_turns()
        collect_seldom()
        context = ray.get_runtime_context()
        title = context.get_actor_name() or "hub"
        super().__init__(streams, cores, nodes, run_dir, title=title, handle=context.current_actor)
        CoreWatch(_Preprocessing(self.feed, self.board, run=title.removesuffix(HUB))).start()

    def address(self, node: str) -> str:
        """See :meth:`Hub.address`."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        return next((str(n["NodeManagerAddress"]) for n in nodes if n["NodeID"] == node), node)
