"""When a run that is told to end has nothing more to wait for, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from offload.measure.steps import Totals
from offload.train.driver.fleet.messages import StopAsked
from offload.train.driver.fleet.state import Fleet
from offload.train.driver.run import Run
from offload.train.messages import News
from tests.train.driver.fleet.made_up import NOTHING, cpu_node, gpu_node, group
from tests.train.driver.fleet.made_up import Run as MadeUp

GPU, CPU = gpu_node("gpu"), cpu_node("cpu")


def over(news: News, fleet: Fleet) -> bool:
    run: Any = SimpleNamespace(log=SimpleNamespace(news=news))
    return Run._nothing_to_commit(run, fleet)


def test_a_run_that_ends_waits_for_the_last_commit_but_not_for_workers_that_died_before_it() -> None:
    run = MadeUp(GPU, CPU)
    assert over(NOTHING, run.fleet), "nothing is trained yet"
    trains = replace(group(1, nodes=["gpu"]), totals={0: Totals(steps=1)})
    run.look(trains, GPU, CPU)
    run.conductor.handle(StopAsked())
    assert not over(trains, run.fleet)
    died = replace(trains, failures=1, running=False)
    assert run.hub.orders.failures_seen < died.failures, "no worker may start"
    assert over(died, run.fleet)
    run.look(died, GPU, CPU)
    assert not over(died, run.fleet), "the driver has looked since: others start, and commit"
