"""The hub as an actor of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from offload.pipeline.feed.datasets import Cores
from offload.train.hub.ray_hub import RayHub

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Asked(RayHub):
    """A hub that says how often its threads switch."""

    def switch_s(self) -> float:
        return sys.getswitchinterval()


def test_a_node_whose_blocks_ray_carries_is_told_once(tmp_path: Path) -> None:
    asked: Any = ray.remote(RayHub)
    here = ray.get_runtime_context().get_node_id()
    hub = asked.options(num_cpus=0).remote({}, Cores(nodes=(here,), task_cpus=1.0, stores={}), 1, tmp_path)
    for reason in ("TimeoutError: timed out", "OSError: no route to host"):
        ray.get(hub.blocks_through_ray.remote(here, reason), timeout=800)
    events = ray.get(hub.read.remote(0), timeout=800).events
    said = [event.sentence({}) for event in events]
    address = ray.util.get_node_ip_address()
    assert said == [
        f"samples of node {address} could not be sent to a worker directly (TimeoutError: timed out): Ray carries them, which takes more "
        "CPU time. A firewall may be blocking the workers' ports"
    ]
    ray.kill(hub)


def test_threads_of_a_hub_switch_more_often_than_those_of_other_processes(tmp_path: Path) -> None:
    """Else the calls of workers wait for a busy thread of the pool, again and again."""
    asked: Any = ray.remote(Asked)
    hub = asked.options(num_cpus=0).remote({}, Cores(nodes=(), task_cpus=1.0, stores={}), 1, tmp_path)
    assert ray.get(hub.switch_s.remote(), timeout=800) <= sys.getswitchinterval() / 4
    ray.kill(hub)
