"""The hub as an actor of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from offload.pipeline.streams import Cores
from offload.train.hub.actor import Hub

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Asked(Hub):
    """A hub that says how often its threads switch."""

    def switch_s(self) -> float:
        return sys.getswitchinterval()


def test_threads_of_a_hub_switch_more_often_than_those_of_other_processes(tmp_path: Path) -> None:
    """Else the calls of workers wait for a busy thread of the pool, again and again."""
    asked: Any = ray.remote(Asked)
    hub = asked.options(num_cpus=0).remote({}, Cores(nodes=(), task_cpus=1.0, stores={}), 1, tmp_path)
    assert ray.get(hub.switch_s.remote(), timeout=300) <= sys.getswitchinterval() / 4
    ray.kill(hub)
