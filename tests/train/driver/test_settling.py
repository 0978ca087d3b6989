"""What a run asks the cluster for: the real policy over ten simulated minutes, on a cluster that grows and shrinks as it is asked."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import offload
from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.model.placement import Bundle, NodeResources, WorkerResources
from offload.report.events.event import DRIVER, RunEvent
from offload.train.config import BatchSize
from offload.train.driver.conductor import Conductor
from offload.train.driver.fleet.messages import ClusterSeen
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Fleet, Starting
from offload.train.driver.fleet.state_machine import GRANT_S, step
from offload.train.driver.tuner import Tuner
from offload.train.messages import GroupStatus, News, Orders
from tests.train.driver.fleet.made_up import Room

BATCH = 64
ALONE = BatchSplit(workers=1, local_batch_size=BATCH, accum_steps=0)
INTERVAL_S = 30.0
POLL_S = 2.0
NODE_CORES = 4
CORE_PER_S = 25.0  # samples/s of one core
START_S = 25.0  # until a node that was asked for is there
IDLE_S = 40.0  # until one that is not used is ended
PROCESS_S = 4.0  # until a core of a new node preprocesses
SLOW, FAST = 90.0, 400.0  # samples/s of the accelerator
WORKER = WorkerResources(cpus=1, gpus=1)
HEAD = NodeResources(name="head", node_id="head", cpus=4, gpus=1, instance_type="ml.g5.xlarge")


@dataclass
class Plant:
    """A run's hub and its cluster, by the clock."""

    rng: random.Random
    most_nodes: int = 8
    busy: float = 0.95  # share of a core's time that preprocessing computes; it waits for storage meanwhile
    now_s: float = 0.0
    missing: Mapping[Bundle, int] = field(default_factory=dict)
    nodes: dict[str, float] = field(default_factory=dict)  # when each joined
    starting: list[float] = field(default_factory=list)
    idle_since: dict[str, float] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)
    used_since: float = 0.0
    totals: Totals = field(default_factory=Totals)
    queued: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    count: list[tuple[float, int]] = field(default_factory=list)

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        self.missing = dict(missing)

    def close(self) -> None:
        self.missing = {}

    def publish(self, orders: Orders) -> None:
        assert orders.workers == 1

    def reshape(self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int) -> Room:
        if Counter(nodes) != self.used:
            self.used, self.used_since = Counter(nodes), self.now_s
        return Room()

    def tell(self, event: RunEvent) -> None:
        self.events.append(event.reported(self.now_s, DRIVER).to_json())

    def alive(self) -> list[NodeResources]:
        return [HEAD, *(NodeResources(name=name, node_id=name, cpus=NODE_CORES) for name in self.nodes)]

    def advance(self, seconds: float, device: float) -> None:
        """Time passes: nodes come and go, and training goes on at the slower of both sides."""
        self.now_s += seconds
        wanted = math.ceil(sum(self.missing.values()) / NODE_CORES)
        while len(self.starting) < min(wanted, self.most_nodes - len(self.nodes)):
            self.starting.append(self.now_s + START_S * self.rng.uniform(0.8, 1.2))
        for at in [at for at in self.starting if at <= self.now_s]:
            self.starting.remove(at)
            self.nodes[f"cpu-{len(self.events)}-{self.now_s:.0f}-{len(self.nodes)}"] = self.now_s
        for name in list(self.nodes):
            if self.used[name] or self.missing:
                self.idle_since.pop(name, None)
            elif self.now_s - self.idle_since.setdefault(name, self.now_s) > IDLE_S:
                del self.nodes[name], self.idle_since[name]
        self.count.append((self.now_s, len(self.nodes)))
        cores = sum(
            count for name, count in self.used.items()
            if name == "head" or (name in self.nodes and self.now_s - max(self.nodes[name], self.used_since) > PROCESS_S)
        )  # fmt: skip
        rate = cores * CORE_PER_S * self.rng.uniform(0.97, 1.03)
        device *= self.rng.uniform(0.98, 1.02)
        steps = max(1, round(min(rate, device) * seconds / BATCH))
        compute_s = BATCH / device
        wait_s = max(BATCH / rate - compute_s, 0.0) if rate else seconds
        self.totals = self.totals.plus(
            Totals(
                steps=steps,
                samples=steps * BATCH,
                step_time_s=steps * (compute_s + wait_s),
                data_wait_s=steps * wait_s,
                compute_s=steps * compute_s,
            )
        )

    def news(self) -> News:
        total = self.used.total()
        starting = sum(
            count for name, count in self.used.items()
            if name != "head" and self.now_s - max(self.nodes.get(name, self.now_s), self.used_since) <= PROCESS_S
        )  # fmt: skip
        return News(
            cursor=0, totals={0: self.totals}, epoch=0, step=self.totals.steps, samples=self.totals.samples, metrics={}, events=(),
            group=GroupStatus(workers=1, split=ALONE), attempts=1, running=True, cores=(total, starting),
            rates={"train": {
                "input_ceiling_samples_per_s": total * CORE_PER_S / self.busy, "input_pace_samples_per_s": total * CORE_PER_S * 1.05,
                "variation": 0.2,
            }},
        )  # fmt: skip


def simulate(plant: Plant, until_s: float, device: Any) -> None:
    """Ten minutes or so of a run that polls, decides and asks, as the driver does."""
    adaptation = offload.Adaptation(interval_s=INTERVAL_S)
    sizes = BatchSize(initial=BATCH)
    terms = Terms(worker=WORKER, bounds=(1, 1), first=(1, 1), chosen=False, cores=(1, 40))
    fleet, first = step(Starting(terms=terms), ClusterSeen(now_s=0.0, nodes=plant.alive()))
    assert isinstance(fleet, Fleet)
    plant.used = Counter(fleet.used)
    conductor = Conductor(
        fleet, first, hub=plant, requests=plant, tell=plant.tell, free=dict, now=lambda: plant.now_s
    )  # fmt: skip
    tuner = Tuner(sizes, adaptation, (1, 40))
    while plant.now_s < until_s:
        plant.advance(POLL_S, device(plant.now_s))
        news = plant.news()
        conductor.look(news, plant.alive())
        conductor.handle(*tuner.look(news, conductor.fleet, plant.now_s))


def planned_nodes(device: float) -> int:
    cores = math.ceil(device / CORE_PER_S)
    return max(math.ceil((cores - (HEAD.cpus - WORKER.cpus)) / NODE_CORES), 0)


@pytest.mark.parametrize("busy", [0.95, 0.3, 0.015])
@pytest.mark.parametrize("seed", range(8))
def test_from_gpu_bound_to_input_bound_and_back_nodes_settle_at_the_planned_number(seed: int, busy: float) -> None:
    plant = Plant(random.Random(seed), busy=busy)
    up_s, down_s, end_s = 120.0, 360.0, 600.0
    simulate(plant, end_s, lambda now_s: FAST if up_s <= now_s < down_s else SLOW)
    assert planned_nodes(FAST) == 4
    assert planned_nodes(SLOW) == 1
    for changed_s, until_s, device in ((up_s, down_s, FAST), (down_s, end_s, SLOW)):
        # The interval during which it changes shows some of both; then come two.
        wanted = [e["cores"] for e in plant.events if e["event"] == "cores_wanted" and changed_s < e["at"] <= until_s]
        settled_s = changed_s + 3 * INTERVAL_S + POLL_S
        late = [e for e in plant.events if e["event"] == "cores_wanted" and settled_s < e["at"] <= until_s]
        cores = math.ceil(device / CORE_PER_S)
        assert not late, "it goes on changing its mind"
        assert wanted == sorted(wanted, reverse=device == SLOW), "it oscillates"
        assert abs(wanted[-1] - cores) <= NODE_CORES
        there = {count for at, count in plant.count if settled_s + START_S * 1.2 + IDLE_S < at <= until_s}
        assert len(there) == 1, "nodes come and go though nothing changes"
        assert abs(there.pop() - planned_nodes(device)) <= 1


def test_nodes_that_do_not_come_are_given_up_and_the_run_goes_on() -> None:
    plant = Plant(random.Random(0), most_nodes=0)
    simulate(plant, GRANT_S + 200, lambda now_s: FAST)
    (told,) = [event for event in plant.events if event["event"] == "not_granted"]
    assert told["cores_now"] == 3
    assert plant.missing == {}
    assert sum(event["event"] == "cores_wanted" for event in plant.events) <= 2
