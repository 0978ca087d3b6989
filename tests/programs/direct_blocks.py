"""Run by test_block_receiver.py, in a process of its own: a worker takes blocks of another raylet, whose sender dies, and which is lost at
last. Prints what it saw."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.pipeline.blocks import receiver, wire
from offload.pipeline.blocks.fetching import BlockLostError
from offload.pipeline.blocks.sender import BlockSenders
from offload.pipeline.feed.passes import Slice
from offload.train.cluster.ray_processes import minimal_agents
from offload.train.worker.data.feed_client import HubFeed

DEADLINE_S = 800.0


class Answer:
    """The hub's answer."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._sender


class Hub:
    """The part of the hub that knows senders."""

    def __init__(self, node: str) -> None:
        self.nodes = {node}
        self.senders = BlockSenders({}, lambda: self.nodes)

    def sender(self, node: str) -> Answer:
        return Answer(self.senders.of(node))

    def blocks_through_ray(self, node: str, reason: str) -> None: ...


class Watched(receiver.DirectBlocks):
    """Tells whether the last block came without Ray."""

    came = False

    def fetch(self, *block: Any) -> Callable[[], Any] | None:
        self.came = False
        if (coming := super().fetch(*block)) is None:
            return None

        def found() -> Any:
            made = coming()
            self.came = made is not None
            return made

        return found


def sender_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "".join(process.cmdline()[:1]).startswith("ray::BlockSender"):
                found.append(process)
    return found


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        watch(cluster, other)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def watch(cluster: Cluster, other: Any) -> None:
    """Fetch blocks of the other node while its sender dies, ends, and the node is lost."""

    @ray.remote(max_retries=0)  # as a method of an actor
    def make(rows: int, size_bytes: int) -> pa.Table:
        content = np.full((rows, size_bytes), 7, np.uint8)
        return wire.encode({"x": content, "text": [str(row) for row in range(rows)]})

    make_there = make.options(scheduling_strategy=NodeAffinitySchedulingStrategy(other.node_id, soft=False))

    def made(rows: int, size_bytes: int = 1_000_000) -> Slice:
        ref = make_there.remote(rows, size_bytes)
        ray.wait([ref], fetch_local=False, timeout=DEADLINE_S)
        return Slice(ref, 1, rows, 0, other.node_id)

    hub = Hub(other.node_id)
    watched = Watched(hub)  # type: ignore[arg-type]
    feed = HubFeed(hub, watched)  # type: ignore[arg-type]

    def direct(piece: Slice) -> bool:
        """Whether the slice came without Ray; it must come in any case."""
        columns = feed.fetch(piece)()
        assert (np.asarray(columns["x"]) == 7).all()
        assert columns["text"] == [str(row) for row in range(1, piece.stop)]
        return watched.came

    receiver.AGAIN_S = receiver.ASK_AGAIN_S = 0.0
    told: dict[str, Any] = {"first": direct(made(2))}
    wait_for(lambda: direct(made(2)))
    told["next"] = [direct(made(40)) for _ in range(5)]
    (process,) = sender_processes()
    process.kill()
    process.wait()
    direct(made(3))  # in any case
    wait_for(lambda: direct(made(2)))
    told["restarted"] = len(sender_processes())
    hub.nodes.clear()
    hub.senders.end_unused()
    wait_for(lambda: not sender_processes())
    told["without_senders"] = direct(made(3))
    lost = made(3)
    cluster.remove_node(other, allow_graceful=False)
    try:
        feed.fetch(lost)()
    except BlockLostError:
        told["lost"] = True
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    with minimal_agents():
        main()
