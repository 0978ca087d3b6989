"""Several runs and the ledger of an arbiter, without processes: real state machines, made-up hubs and workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.adapt.observe import Seen, StepSeen
from offload.arbiter.ledger import ClusterSeen as NodesSeen
from offload.arbiter.ledger import Departed, Ledger, Reported, Tick, due, step
from offload.arbiter.values import LEASE_S, REPORT_S, Lease, Report
from offload.errors import ConfigError
from offload.measure.steps import Totals
from offload.model.allocation.values import Holding
from offload.model.batch_split import BatchSplit
from offload.model.placement import NodeResources, WorkerResources, beside
from offload.report.events import Decided
from offload.train.config import Adaptation, BatchSize, Cluster
from offload.train.driver.conductor import Conductor
from offload.train.driver.fleet.messages import ClusterSeen, Event, LeaseSeen, WorkersEnded
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Fleet, Paused, Starting, Stranded
from offload.train.driver.fleet.state_machine import step as step_of_run
from offload.train.driver.leasing import Leasing, Wishes, check_sharing, held_by_others, holding_of, job_of
from offload.train.driver.steering import obey, state_of
from offload.train.driver.tuner import Tuner
from offload.train.group.group import Plan
from offload.train.messages import News
from offload.train.steering.messages import Command
from tests.train.driver.fleet.made_up import NOTHING, Autoscaler, Hub, group, split_of

WORKER = WorkerResources(cpus=1, gpus=1)
NODES = tuple(
    NodeResources(name=name, node_id=name, cpus=cpus, gpus=gpus, gpu_type="A10G" if gpus else None)
    for name, cpus, gpus in (("a", 6, 2), ("b", 6, 2), ("c", 8, 0))
)


class Shared:
    """A cluster that an arbiter shares."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ledger = Ledger(started_at=self.now)
        self.tell(NodesSeen(at=self.now, nodes=NODES))
        self.runs: list[Tenant] = []

    def tell(self, event: Reported | Departed | NodesSeen | Tick) -> None:
        self.ledger, _ = step(self.ledger, event)

    def begin(self, name: str, bounds: tuple[int, int] = (1, 4), **cluster: float) -> Tenant:
        self.runs.append(Tenant(self, name, bounds, Cluster(arbiter=True, **cluster)))  # type: ignore[arg-type]
        return self.runs[-1]

    def turn(self, *, wait_s: float = 1.0) -> None:
        """Let everybody look once."""
        self.now += wait_s
        if self.now >= due(self.ledger):
            self.tell(Tick(at=self.now))
        for run in self.runs:
            run.turn()
            self.check()

    def settle(self) -> None:
        for _ in range(40):
            self.turn(wait_s=REPORT_S / 4)

    def check(self) -> None:
        """No node holds more than it has."""
        for node in NODES:
            workers = sum(run.homes[node.node_id] for run in self.runs)
            cores = sum(run.preprocess[node.node_id] for run in self.runs)
            assert workers <= node.gpus
            assert workers * WORKER.cpus + cores <= node.cpus


class Tenant:
    """A run on the shared cluster. Its workers end ``slow`` turns later than they are told to, and train as much later than they start.
    Cores that preprocess no more are free ``lingers`` turns later."""

    def __init__(self, shared: Shared, name: str, bounds: tuple[int, int], cluster: Cluster) -> None:
        self.shared, self.name, self.slow, self.lingers = shared, name, 0, 0
        self.preprocess: Counter[str] = Counter()  # processes, by node
        self.let_go = self.lingered = 0
        self.lease: Lease | None = None
        terms = Terms(worker=WORKER, bounds=bounds, first=bounds)
        wishes = Wishes(name=name, terms=terms, batch_size=BatchSize(initial=16, max=256), cluster=cluster)
        self.clock_off_s = 0.0  # of its host
        self.leasing = Leasing(self, wishes, clock=lambda: shared.now + self.clock_off_s, now=lambda: shared.now)
        self.state: Starting = Starting(terms=terms)
        self.conductor: Conductor | None = None
        self.hub, self.attempt, self.running, self.turns = Hub(), 0, False, 0
        self.newest: Plan | None = None
        self.seen = Seen()
        self.homes: Counter[str] = Counter()

    # -- its side of the arbiter, in this process

    def start(self, changed: object) -> None: ...

    def report(self, report: Report) -> None:
        self.shared.tell(Reported(at=self.shared.now, report=report))
        self.lease = self.shared.ledger.tenants[self.name].lease

    def depart(self) -> None:
        self.lease = None
        self.shared.tell(Departed(at=self.shared.now, name=self.name))

    def close(self) -> None:
        self.depart()

    # -- the run

    @property
    def fleet(self) -> Fleet:
        assert self.conductor is not None
        return self.conductor.fleet

    @property
    def shown(self) -> tuple[str, str]:
        return state_of(self.fleet, self.news())

    def news(self) -> News:
        workers = self.homes.total() if self.running else 0
        news = (
            group(workers, self.attempt, nodes=tuple(self.homes))
            if workers
            else replace(NOTHING, attempts=self.attempt)
        )
        return replace(news, cores=(len(self.hub.cores), 0), let_go=self.let_go)

    def turn(self) -> None:
        if self.conductor is None:
            self._try_to_start()
            return
        news = self.news()
        self.conductor.handle(*self.leasing.look(self.fleet, news, self.seen, self.newest))
        fleet = self.fleet
        held = fleet.room.node_ids(fleet.placement.held) if not isinstance(fleet.phase, Stranded) else ()
        self._look(news, Counter(held))
        self._obey()
        self._let_go()

    def _let_go(self) -> None:
        wanted = Counter(self.hub.cores)
        surplus = self.preprocess - wanted
        self.lingered = self.lingered + 1 if surplus else 0
        if self.lingered <= self.lingers and surplus:
            self.preprocess |= wanted
        else:
            self.preprocess, self.let_go, self.lingered = wanted, self.hub.number, 0

    def _try_to_start(self) -> None:
        lease = self.leasing.wait()
        if lease is None:
            return
        state, _ = step_of_run(self.state, LeaseSeen(lease=lease))
        seen = ClusterSeen(now_s=self.shared.now, nodes=self._leased(lease, Counter()))
        began, actions = step_of_run(state, seen)
        if isinstance(began, Fleet):
            self.hub.cores = tuple(began.used.elements())
            self.conductor = Conductor(
                began, actions, hub=self.hub, requests=Autoscaler(), tell=lambda event: None, free=dict
            )  # fmt: skip
            self._obey()
            self._let_go()

    def _leased(self, lease: Lease | None, workers: Counter[str]) -> list[NodeResources]:
        held = held_by_others(lease, NODES, WORKER, workers)
        return [beside(node, held[node.node_id]) for node in NODES]

    def _look(self, news: News, workers: Counter[str]) -> None:
        assert self.conductor is not None
        self.hub.room.made = self.let_go == self.hub.number
        self.conductor.look(news, self._leased(self.fleet.lease, workers))
        if isinstance(self.fleet.phase, Paused) and not self.homes:
            self.conductor.handle(WorkersEnded(serial=self.hub.orders.serial))

    def _obey(self) -> None:
        orders = self.hub.orders
        if self.running:
            if orders.ends_group >= self.attempt and self._waited():
                self.running, self.homes = False, Counter()
        elif not self.homes:
            if orders.workers:
                assert len(orders.homes) == orders.workers, "the arbiter has chosen the nodes"
                self.newest = Plan(attempt=self.attempt + 1, workers=orders.workers, homes=orders.homes)
                self.homes = Counter(orders.homes)
        elif self.homes != Counter(orders.homes):
            self.homes, self.turns = Counter(), 0  # overtaken by newer orders
        elif self._waited():
            self.attempt, self.running = self.attempt + 1, True

    def _waited(self) -> bool:
        self.turns = (self.turns + 1) % (self.slow + 1)
        return not self.turns

    def end(self) -> None:
        self.shared.runs.remove(self)
        self.leasing.close()


def obeyed(command: Command, fleet: Fleet, split: BatchSplit, sizes: BatchSize) -> list[Event]:
    """The events by which a run obeys a command that it does not refuse."""
    events = obey(command, fleet, split, sizes)
    assert isinstance(events, list)
    return events


def allotted(run: Tenant) -> tuple[dict[str, int], dict[str, int]]:
    """The workers and cores that the arbiter wants a run to have."""
    holding = run.shared.ledger.tenants[run.name].lease.allotment.holding
    return dict(+Counter(holding.workers)), dict(+Counter(holding.cores))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_runs_reach_what_the_arbiter_wants_and_never_hold_more_than_there_is(data: st.DataObject) -> None:
    shared = Shared()
    for number in range(data.draw(st.integers(1, 6), label="events")):
        if shared.runs and data.draw(st.integers(0, 3)) == 0:
            data.draw(st.sampled_from(shared.runs)).end()
        else:
            least = data.draw(st.integers(1, 3))
            run = shared.begin(
                f"run {number}", (least, data.draw(st.integers(least, 4))), priority=data.draw(st.integers(0, 2))
            )
            run.slow, run.lingers = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3))
        for _ in range(data.draw(st.integers(0, 12))):
            shared.turn(wait_s=data.draw(st.sampled_from([0.5, 5.0])))
    shared.settle()
    for run in shared.runs:
        workers, cores = allotted(run)
        assert dict(run.homes) == workers
        assert dict(Counter(run.hub.cores)) == cores
        if run.conductor is not None:
            assert (run.shown[0] == "waiting") == (not workers)


def test_a_run_of_higher_priority_gets_its_least_and_the_other_waits_then_goes_on() -> None:
    shared = Shared()
    first = shared.begin("first", (3, 4))
    shared.settle()
    assert first.homes.total() >= 3
    urgent = shared.begin("urgent", (2, 2), priority=1)
    shared.settle()
    assert urgent.homes.total() == 2
    assert first.homes.total() == 0
    assert not first.hub.cores
    assert first.shown[0] == "waiting"
    assert first.shown[1].startswith("the arbiter: ")
    urgent.end()
    shared.settle()
    assert first.homes.total() >= 3
    assert first.shown == ("training", "")


def test_others_get_the_room_of_workers_that_have_ended_before_the_next_ones_train() -> None:
    shared = Shared()
    first = shared.begin("first", (1, 4))
    shared.settle()
    steps = {(1, n, 16 // n): StepSeen(compute_s=0.4 / n, last_s=0.4 / n, weight=10.0) for n in (1, 2)}
    first.seen = Seen(steps=steps, ceiling_samples_per_s=4000.0, cores=2)
    shared.settle()
    assert first.homes.total() == 4
    first.slow = 30
    urgent = shared.begin("urgent", (3, 3), priority=1)
    while not urgent.running:
        shared.turn()
    assert first.homes
    assert not first.running


def test_a_run_that_loses_its_workers_gives_its_cores_back_once_the_arbiter_asks() -> None:
    shared = Shared()
    run = shared.begin("run", (2, 2))
    shared.settle()
    assert run.conductor is not None
    assert run.lease is not None
    left = [node for node in run._leased(run.lease, Counter()) if node.node_id not in run.homes]
    run.conductor.look(replace(NOTHING, attempts=1), left)
    assert isinstance(run.fleet.phase, Stranded)
    assert run.fleet.used
    assert dict(holding_of(run.fleet, {}, run.newest).cores) == dict(run.fleet.used)
    nothing = replace(run.lease, number=run.lease.number + 1, holding=Holding())
    run.conductor.handle(LeaseSeen(lease=nothing))
    run.conductor.look(replace(NOTHING, attempts=1), left)
    assert holding_of(run.fleet, {}, run.newest) == Holding()
    assert run.hub.cores == ()


@pytest.mark.parametrize(("age_s", "allowed"), [(LEASE_S - REPORT_S, True), (LEASE_S, False)])
@pytest.mark.parametrize("clock_off_s", [-3600.0, 0.0, 3600.0])
def test_an_expired_lease_allows_nothing_new(age_s: float, allowed: bool, clock_off_s: float) -> None:
    shared = Shared()
    run = shared.begin("run", (1, 1))
    shared.begin("other", (1, 1))
    shared.settle()
    lease = run.lease
    assert lease is not None
    run.report = lambda report: None  # type: ignore[method-assign]  # the arbiter has gone
    all_cores = {node.node_id: int(node.cpus) - run.homes[node.node_id] for node in NODES}
    run.lease = replace(lease, number=lease.number + 1, holding=replace(lease.holding, cores=all_cores))
    before = Counter(run.hub.cores)
    assert before != all_cores
    run.clock_off_s = clock_off_s
    shared.now += age_s
    run.turn()
    assert Counter(run.hub.cores) == (all_cores if allowed else before)


def test_a_run_whose_clock_is_set_back_keeps_its_place() -> None:
    shared = Shared()
    run = shared.begin("run", (1, 1))
    shared.settle()
    run.clock_off_s = -3600.0
    for _ in range(40):
        shared.turn(wait_s=REPORT_S / 4)
        assert "run" in shared.ledger.tenants
    assert run.running


def test_an_arbitrated_run_refuses_a_resize_and_can_be_paused() -> None:
    shared = Shared()
    run = shared.begin("run", (1, 1))
    shared.settle()
    sizes = BatchSize(initial=16)
    refused = obey(Command(action="resize", workers=1), run.fleet, split_of(1), sizes)
    assert "the arbiter chooses its workers" in str(refused)
    assert run.conductor is not None
    run.conductor.handle(*obeyed(Command(action="pause"), run.fleet, split_of(1), sizes))
    shared.settle()
    assert run.homes.total() == 0
    assert "run" not in shared.ledger.tenants
    run.conductor.handle(*obeyed(Command(action="resume"), run.fleet, split_of(1), sizes))
    shared.settle()
    assert run.homes.total() == 1


def test_a_resumed_run_takes_nothing_until_the_arbiter_gives_it_room() -> None:
    shared = Shared()
    first = shared.begin("first", (4, 4), preemptible=False)
    shared.settle()
    sizes = BatchSize(initial=16)
    assert first.conductor is not None
    first.conductor.handle(*obeyed(Command(action="pause"), first.fleet, split_of(4), sizes))
    shared.settle()
    urgent = shared.begin("urgent", (2, 4), priority=1)
    shared.settle()
    assert urgent.running
    first.conductor.handle(*obeyed(Command(action="resume"), first.fleet, split_of(4), sizes))
    assert first.shown == ("waiting", "the arbiter: resumed just now")
    for _ in range(20):
        shared.turn()
        assert first.homes.total() == 0
        assert urgent.running
    assert first.shown[0] == "waiting"
    urgent.end()
    shared.settle()
    assert first.homes.total() == 4
    assert first.shown == ("training", "")


@pytest.mark.parametrize(
    ("cluster", "scheduled", "executed", "error"),
    [
        (Cluster(arbiter=True, autoscale_workers=True), False, [], "an arbiter shares the cluster as it is"),
        (Cluster(arbiter=True), True, [], "and so does the schedule: drop one of them"),
        (Cluster(arbiter=True), False, ["train"], "Ray Data executes train on cores of its own choice"),
    ],
)
def test_what_cannot_be_left_to_an_arbiter_is_refused(
    cluster: Cluster, scheduled: bool, executed: list[str], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        check_sharing(cluster, scheduled=scheduled, executed=executed)


def test_preprocessing_that_waits_needs_cores_by_the_clock() -> None:
    seen = Seen(
        steps={(1, 1, 16): StepSeen(compute_s=0.1, last_s=0.1, weight=10.0)}, ceiling_samples_per_s=4000.0, cores=2
    )
    waits = replace(NOTHING, cores=(4, 0), rates={"train": {"input_pace_samples_per_s": 40.0}})
    terms = Terms(worker=WORKER, bounds=(1, 4), first=(1, 4))
    wishes = Wishes(name="run", terms=terms, batch_size=BatchSize(initial=16), cluster=Cluster(arbiter=True))
    for cores in (waits, replace(waits, cores=(0, 0))):
        job = job_of(wishes, Holding(), seen, cores, kind="A10G")
        assert job.measured, "a run that waits for others knows what it has measured"
        assert job.core_seconds_per_sample == (pytest.approx(4 / 40.0) if cores is waits else 2 / 4000.0)


@pytest.mark.parametrize(("step_s", "decided"), [(0.5, [10, 40, 70]), (5.0, [15, 45, 75]), (20.0, [30, 60, 90])])
def test_the_arbiter_hears_of_a_number_of_workers_before_the_first_interval_ends(
    step_s: float, decided: list[int]
) -> None:
    shared = Shared()
    run = shared.begin("run", (1, 1))
    shared.settle()

    def decisions(fleet: Fleet) -> list[int]:
        tuner, times = Tuner(BatchSize(initial=16), Adaptation(interval_s=30.0)), []
        for now in range(91):
            steps = int(now / step_s)
            totals = Totals(steps=steps, samples=8 * steps, step_time_s=now, compute_s=0.1 * steps)
            rates = {"train": {"input_ceiling_samples_per_s": 100.0}}
            news = replace(run.news(), totals={0: totals}, rates=rates, cores=(fleet.cores, 0))
            if any(isinstance(event, Decided) for event in tuner.look(news, fleet, now)):
                times.append(now)
        return times

    assert decisions(run.fleet) == decided
    assert decisions(replace(run.fleet, lease=None)) == [30, 60, 90]


def trainer(**named: Any) -> offload.Trainer:
    rows = [{"x": torch.tensor(float(n))} for n in range(64)]
    return offload.Trainer(lambda ctx: None, datasets={"train": offload.from_torch(rows)}, batch_size=16, **named)


def test_a_weight_or_priority_without_an_arbiter_is_refused() -> None:
    for values in ({"weight": 2.0}, {"priority": 1}):
        with pytest.raises(ConfigError, match=r"matters only with an arbiter: add Cluster\(arbiter=True\), or drop it"):
            trainer().with_sharing(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Cluster: weight must be greater than 0"):
        trainer().with_sharing(arbiter=True, weight=-1.0)
    with pytest.raises(ConfigError, match="Cluster: priority must be a whole number"):
        Cluster(priority=0.5)  # type: ignore[arg-type]
    shared = trainer().with_sharing(arbiter=True, weight=2.0, priority=1).cluster
    assert (shared.arbiter, shared.weight, shared.priority) == (True, 2.0, 1)


def test_a_machine_alone_has_no_arbiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"this run uses this machine alone: name a cluster with address='HOST:PORT'"):
        trainer(cluster=Cluster(arbiter=True)).fit(run_dir=tmp_path / "run", quiet=True)
