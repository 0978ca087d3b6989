"""The run's one actor beside the driver: it feeds the workers and hears from them. (Each process more would cost a start
some seconds.)

A module of its own that imports neither torch nor Ray Train: on a host with few cores this process starts beside the
workers, which do import them.
"""

from __future__ import annotations

import ray

from offload.pipeline.feed import Cores, Feed, Stream
from offload.train.monitor import Monitor, Orders


class Hub(Feed, Monitor):
    """What workers take from and push to, and what the driver reads."""

    def __init__(self, streams: dict[str, Stream], cores: Cores, workers: int, nodes: int) -> None:
        Monitor.__init__(self, self.rates, self.cores, self.speeds, self.process_bytes, workers=workers, nodes=nodes)
        Feed.__init__(self, streams, cores, run=ray.get_runtime_context().current_actor)

    def begin_group(self) -> tuple[int, Orders, float]:
        """A worker group starts. Returns the number of the attempt, what it is told now (what was ordered of the group before it
        is done), and :meth:`Monitor.failures_per_s`."""
        self.anew()
        return self.begin(), self.orders(), self.failures_per_s()

    def lost(self, node: str, error: BaseException) -> None:
        """A preprocessing process died."""
        self.note("preprocessing_lost", node=node, reason=str(error).strip().splitlines()[0])

    def slow(self, node: str, what: str, seconds: float) -> None:
        """A preprocessing process has been at something for long."""
        self.note("preprocessing_slow", node=_address(node), what=what, seconds=round(seconds))

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """A preprocessing process ends, since what it does cannot be interrupted."""
        super().given_up(_address(node), what, seconds)

    def works(self, node: str) -> None:
        """A node has begun to preprocess."""
        self.note("node_preprocesses", node=node)


def _address(node_id: str) -> str:
    """What users know a node by."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next((str(n["NodeManagerAddress"]) for n in nodes if n["NodeID"] == node_id), node_id)
