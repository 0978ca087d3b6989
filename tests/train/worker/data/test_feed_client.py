"""Blocks of other nodes come over links; blocks of this node are here at once."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.feed.passes import PassKey, Slice
from offload.train.worker.data.feed_client import HubFeed
from tests.emulation.hosts import Hosts
from tests.emulation.netns import HostSpec
from tests.helpers import RAY_STARTS_NOTHING_AHEAD, ROOT, require_hosts

SCRIPT = """
import json, threading
import numpy as np, pyarrow as pa, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from offload.pipeline.blocks import wire
from offload.pipeline.feed.passes import Slice
from offload.train.worker.data.feed_client import BlockReader

ray.init(log_to_driver=False)
home = ray.get_runtime_context().get_node_id()
(away,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != home]

@ray.remote
def block(rows, size_bytes):
    return wire.encode({"x": np.zeros((rows, size_bytes), np.uint8)})

def made(node, count, size_bytes):
    on = block.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
    refs = [on.remote(1, size_bytes) for _ in range(count)]
    ray.wait(refs, num_returns=count, fetch_local=False)
    return [Slice(ref, 0, 1, 0) for ref in refs]

(far,), near = made(away, 1, 8_000_000), made(home, 20, 200_000)
reader = BlockReader()
coming = reader.fetch(far)
arrived = threading.Event()

def read_far():
    assert coming()["x"].nbytes == 8_000_000
    arrived.set()

threading.Thread(target=read_far, daemon=True).start()
for _ in range(50):  # the other thread waits by then
    for piece in near:
        reader.fetch(piece)()
print(json.dumps({"near_came_first": not arrived.is_set()}))
"""


@pytest.mark.hosts
@pytest.mark.soak
def test_blocks_of_this_node_do_not_wait_while_another_comes_over_a_slow_link() -> None:
    require_hosts()
    with Hosts({"gpu-1": HostSpec(), "cpu-1": HostSpec(mbit_per_s=4.0)}) as hosts:
        env = {"PYTHONPATH": str(ROOT), **RAY_STARTS_NOTHING_AHEAD}
        hosts.start_ray(head="gpu-1", num_cpus={"gpu-1": 1, "cpu-1": 1}, env=env)
        ran = hosts["gpu-1"].run([sys.executable, "-c", SCRIPT], env={"PYTHONPATH": str(ROOT)}, timeout=800)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout.strip().splitlines()[-1]) == {"near_came_first": True}


class Answer:
    """The hub's answer to a request."""

    def __init__(self, slices: list[Slice], *, done: bool) -> None:
        self._answer, self._done = (slices, False), done

    def done(self) -> bool:
        return self._done

    def result(self) -> tuple[list[Slice], bool]:
        return self._answer


class WaitingHub:
    """A hub with one slice: it answers the first request at once, and later ones never."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self._requests = 0

    def next_slices(self, *request: Any) -> Answer:
        self._requests += 1
        first = self._requests == 1
        return Answer([Slice(None, 0, 1, 0)] if first else [], done=first)  # type: ignore[arg-type]

    def arrived(self, key: PassKey, rank: int, reach: str, arrived: int) -> None:
        self.told.append(arrived)


def test_an_arrival_is_told_at_once_only_while_the_next_request_waits() -> None:
    key, hub = PassKey(attempt=1, name="train", number=0), WaitingHub()
    feed = HubFeed(hub, DirectBlocks(hub))  # type: ignore[arg-type]
    feed.arrived(key, 0, "far", 0)
    assert hub.told == [], "there was no request yet: the next one tells it"
    assert len(feed.next_slices(key, 0, 1, "far", arrived=0)[0]) == 1
    feed.arrived(key, 0, "far", 1)
    feed.arrived(key, 0, "near", 1)
    assert hub.told == [1]
