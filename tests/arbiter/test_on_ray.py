"""The arbiter as an actor of a real Ray, with runs that only report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import ray

from offload import arbiter as sharing
from offload.arbiter import registry
from offload.arbiter.values import Lease, Report, same
from offload.errors import ConfigError
from offload.model.allocation.values import NO_GPU, Holding, Job, Rules
from offload.model.placement import WorkerResources
from offload.train.cluster.holdings import Holdings
from offload.train.steering.listening import Listening
from offload.train.steering.messages import RunState
from offload.train.steering.registry import open_desk
from tests.arbiter.test_ledger import SCALES
from tests.helpers import eventually

DEADLINE_S = 800.0


@dataclass
class Run:
    """A run that reports, and obeys at once."""

    job: Job
    since: float = field(default_factory=time.time)
    lease: Lease | None = None
    holding: Holding = field(default_factory=Holding)

    def report(self) -> Lease:
        """Report, and take up and give back what the answer says."""
        report = Report(job=replace(self.job, present=self.holding), since=self.since, lease=self.lease)
        self.lease = answered("report", report)
        self.holding = self.lease.holding
        return self.lease

    def poll(self) -> Any:
        """An answer that comes when the lease changes."""
        assert self.lease is not None
        return actor().changed.remote(self.job.name, self.lease.number, DEADLINE_S)


def actor() -> Any:
    found = registry.arbiter()
    assert found is not None
    return found


def answered(method: str, *arguments: Any) -> Any:
    """The arbiter's answer, when it is there again."""
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            return ray.get(getattr(actor(), method).remote(*arguments), timeout=DEADLINE_S)
        except ray.exceptions.RayActorError:
            assert time.monotonic() < until


@ray.remote(num_cpus=0)
class Program:
    """A program whose run has a desk."""

    def __init__(self, run: str) -> None:
        state = RunState(name=run, user="ana", host="head", pid=1, run_dir="/runs", since=time.time())
        self.desk = open_desk(state, Holdings(), {}, Listening())
        self.desk.wait_for_watch()

    def run(self) -> str:
        return self.desk.state.name


def a_run(name: str) -> Run:
    return Run(
        job=Job(
            name=name,
            step_times={NO_GPU: SCALES},
            batch_size=64,
            core_seconds_per_sample=0.002,
            worker=WorkerResources(cpus=1.0),
            workers=(1, 2),
        )
    )


@pytest.mark.ray
@pytest.mark.slow
def test_runs_share_a_cluster_and_lose_nothing_with_their_arbiter(ray_cluster: None) -> None:
    with pytest.raises(ConfigError, match="no arbiter runs on this Ray cluster: start one with offload arbiter start"):
        sharing.status()
    sharing.start(rules=Rules(fairness=-2.0))
    try:
        with pytest.raises(ConfigError, match="an arbiter runs already on this Ray cluster"):
            sharing.start()
        program = Program.remote("leaves")  # type: ignore[attr-defined]
        leaves, stays = a_run(ray.get(program.run.remote())), a_run("stays")
        eventually(lambda: leaves.report().holding.worker_count == 2)
        waits = leaves.poll()
        stays.report()
        less = ray.get(waits, timeout=DEADLINE_S) or leaves.report()  # after a minute without news
        assert less.holding.worker_count == 1, "somebody has come"
        leaves.report()  # and lets go
        leaves.report()
        eventually(lambda: stays.report().holding.worker_count == 1)
        stays.report()  # with what it has taken up
        status = sharing.status()
        assert status.rules.fairness == -2.0
        assert {run.name: run.holding.worker_count for run in status.runs} == {"leaves": 1, "stays": 1}
        assert sum(node.cpus_of_runs for node in status.nodes) <= sum(node.cpus for node in status.nodes)
        assert status.others == {}
        # Its process dies, and a new one learns from the reports.
        ray.kill(actor(), no_restart=False)
        eventually(lambda: answered("status").started_at > status.started_at)
        for run in (leaves, stays):
            before = run.lease
            assert before is not None
            after = run.report()
            assert after.number == before.number
            assert same(after.holding, before.holding)
        ray.kill(program)  # the desk tells the arbiter
        eventually(lambda: [run.name for run in answered("status").runs] == ["stays"])
        sharing.weigh("stays", 4.0)
        assert {run.name: run.weight for run in sharing.status().runs} == {"stays": 4.0}
        with pytest.raises(ConfigError, match="no run 'leaves' reports to the arbiter: the runs that do are stays"):
            sharing.weigh("leaves", 4.0)
        eventually(lambda: stays.report().holding.worker_count == 2)
    finally:
        sharing.stop()
    eventually(lambda: registry.arbiter() is None)
    with pytest.raises(ConfigError, match="no arbiter runs"):
        sharing.stop()
