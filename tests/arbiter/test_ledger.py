"""Laws of the ledger, in a world of runs that report, act, hang, die and leave in any order."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.arbiter.handover import Claim, amounts, hand_over
from offload.arbiter.ledger import (
    BREATH_S,
    GRACE_S,
    ROUND_S,
    ClusterSeen,
    Departed,
    Event,
    Ledger,
    Reported,
    Tick,
    Weighed,
    due,
    step,
)
from offload.arbiter.values import LEASE_S, REPORT_S, Lease, Report, same
from offload.errors import ConfigError
from offload.model import StepTime
from offload.model.allocation.values import Allotment, Holding, Job
from offload.model.placement import NodeResources

# A step that scales: twice the workers do nearly twice the work.
SCALES = StepTime(0.001, 0.01, 0.001, 0.0, 0.002, 0.0)
NODES = (
    NodeResources(name="a", cpus=8, gpus=2, gpu_type="A"),
    NodeResources(name="b", cpus=8, gpus=2, gpu_type="A"),
    NodeResources(name="c", cpus=4),
)
START = 1000.0


def a_job(name: str, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "step_times": {"A": SCALES},
        "batch_size": 64,
        "workers": (1, 4),
        "core_seconds_per_sample": 0.002,
    }
    return Job(name=name, **{**values, **changes})


jobs = st.builds(
    a_job,
    st.just("run"),
    step_times=st.sampled_from([{}, {"A": SCALES}]),
    workers=st.sampled_from([(1, 1), (1, 4), (2, 4)]),
    cores=st.sampled_from([(0, 64), (2, 64)]),
    core_seconds_per_sample=st.sampled_from([0.0, 0.002, 0.02]),
    weight=st.sampled_from([1.0, 3.0]),
    priority=st.sampled_from([0, 0, 1]),
    preemptible=st.sampled_from([True, True, False]),
    restart_s=st.sampled_from([0.0, 30.0]),
)


@dataclass
class Run:
    """A run that keeps the promises of :mod:`offload.arbiter.values`."""

    job: Job
    since: float
    lease: Lease | None = None
    holding: Holding = field(default_factory=Holding)
    hangs: bool = False
    reported_at: float = 0.0

    def report(self) -> Report:
        return Report(job=replace(self.job, present=self.holding), since=self.since, lease=self.lease)

    def give_back(self) -> None:
        if self.lease is not None:
            self.holding = common(self.holding, self.lease.holding)

    def take_up(self, now: float) -> None:
        if self.lease is not None and now < self.lease.expires_at:
            self.give_back()
            self.holding = self.lease.holding


def common(one: Holding, other: Holding) -> Holding:
    return Holding(
        kind=one.kind,
        workers={node: min(n, other.workers.get(node, 0)) for node, n in one.workers.items()},
        cores={node: min(n, other.cores.get(node, 0)) for node, n in one.cores.items()},
    )


def summed(runs: Any) -> dict[str, dict[str, float]]:
    total: dict[str, dict[str, float]] = {}
    for run in runs:
        for node, of_node in amounts(run.job.worker, run.holding).items():
            mine = total.setdefault(node, {})
            for name, value in of_node.items():
                mine[name] = mine.get(name, 0.0) + value
    return total


def excess(nodes: tuple[NodeResources, ...], held: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The nodes that hold more than they have."""
    wholes = {node.name: {"CPU": node.cpus, "GPU": node.gpus} for node in nodes}
    return {n: of for n, of in held.items() if n in wholes and any(of[r] > wholes[n][r] + 1e-6 for r in wholes[n])}


class World(RuleBasedStateMachine):
    """Messages may be as late as they like; only time makes live runs report."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.runs: dict[str, Run] = {}
        self.nodes = NODES
        self.ledger = Ledger(started_at=self.now - REPORT_S)
        self.arrived = 0

    def send(self, event: Event) -> dict[str, Lease]:
        before = self.ledger
        self.ledger, changed = step(before, event)
        for name, lease in changed.items():
            old = before.tenants.get(name)
            assert old is None or not same(old.lease.holding, lease.holding)
            assert lease.reason
        return changed

    def see_cluster(self) -> None:
        strangers = [run for name, run in self.runs.items() if name not in self.ledger.tenants]
        self.send(ClusterSeen(at=self.now, nodes=self.nodes, others=summed(strangers)))

    def report_of(self, name: str) -> None:
        self.send(Reported(at=self.now, report=self.runs[name].report()))
        self.runs[name].reported_at = self.now

    def one(self, data: Any, *, hangs: bool = False) -> str:
        name: str = data.draw(st.sampled_from([name for name, run in self.runs.items() if run.hangs == hangs]))
        return name

    def some(self, data: Any) -> list[str]:
        living = [name for name, run in self.runs.items() if not run.hangs]
        names: list[str] = data.draw(st.lists(st.sampled_from(living), min_size=1, unique=True))
        return names

    def learns(self, name: str) -> None:
        if name in self.ledger.tenants:
            self.runs[name].lease = self.ledger.tenants[name].lease

    def living(self) -> bool:
        return any(not run.hangs for run in self.runs.values())

    def hung(self) -> bool:
        return any(run.hangs for run in self.runs.values())

    @initialize()
    def start(self) -> None:
        self.see_cluster()

    @precondition(lambda self: len(self.runs) < 4)
    @rule(job=jobs, learn=st.booleans())
    def arrive(self, job: Job, learn: bool) -> None:
        self.arrived += 1
        name = f"run {self.arrived}"
        self.runs[name] = Run(job=replace(job, name=name), since=self.now)
        self.report_of(name)
        if learn:
            self.learns(name)

    @precondition(living)
    @rule(data=st.data(), learn=st.booleans())
    def report(self, data: Any, learn: bool) -> None:
        for name in self.some(data):
            self.report_of(name)
            if learn:
                self.learns(name)

    @precondition(living)
    @rule(data=st.data())
    def learn(self, data: Any) -> None:
        for name in self.some(data):
            self.learns(name)

    @precondition(living)
    @rule(data=st.data())
    def take_up(self, data: Any) -> None:
        for name in self.some(data):
            self.runs[name].take_up(self.now)

    @precondition(living)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        for name in self.some(data):
            self.runs[name].give_back()

    @precondition(living)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        name = self.one(data)
        del self.runs[name]
        self.send(Departed(at=self.now, name=name))

    @precondition(living)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        del self.runs[self.one(data)]

    @precondition(living)
    @rule(data=st.data())
    def hang(self, data: Any) -> None:
        self.runs[self.one(data)].hangs = True

    @precondition(hung)
    @rule(data=st.data())
    def wake_up(self, data: Any) -> None:
        self.runs[self.one(data, hangs=True)].hangs = False

    @rule()
    def look(self) -> None:
        self.see_cluster()

    @rule(seconds=st.sampled_from([1.0, 5.0, REPORT_S]), times=st.sampled_from([1, 1, 8]))
    def wait(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.now += seconds
            for name, run in self.runs.items():
                if not run.hangs and self.now - run.reported_at >= REPORT_S:
                    self.report_of(name)
            self.send(Tick(at=self.now))
            assert due(self.ledger) > self.now

    @rule()
    def lose_the_ledger(self) -> None:
        # A run that is late for the recovery is Ray's business.
        self.runs = {name: run for name, run in self.runs.items() if not run.hangs}
        self.ledger = Ledger(started_at=self.now)
        for run in self.runs.values():
            run.reported_at = self.now - REPORT_S / 2
        self.see_cluster()

    @invariant()
    def no_node_holds_more_than_it_has(self) -> None:
        assert excess(self.nodes, summed(self.runs.values())) == {}

    def teardown(self) -> None:
        """Once all runs report and obey, each reaches its allotment."""
        for run in self.runs.values():
            run.hangs = False
        for _ in range(80):
            self.now += REPORT_S / 2  # after a lost ledger, every run reports before it decides
            self.see_cluster()
            for name, run in self.runs.items():
                self.report_of(name)
                run.lease = self.ledger.tenants[name].lease
                run.take_up(self.now)
                self.no_node_holds_more_than_it_has()
            if self.ledger.recovered_at < self.now and set(self.runs) == set(self.ledger.tenants):
                tenants = self.ledger.tenants
                if all(same(run.holding, tenants[name].lease.allotment.holding) for name, run in self.runs.items()):
                    return
        raise AssertionError(f"not settled: {self.ledger}")


World.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase


def settled(ledger: Ledger, runs: dict[str, Run], now: float) -> tuple[Ledger, float]:
    """The ledger after all runs have obeyed."""
    for _ in range(20):
        now += REPORT_S / 2
        for name, run in runs.items():
            ledger, _ = step(ledger, Reported(at=now, report=run.report()))
            run.lease = ledger.tenants[name].lease
            run.take_up(now)
        if ledger.decided_at is not None and all(
            same(run.holding, ledger.tenants[name].lease.allotment.holding) for name, run in runs.items()
        ):
            break
    for run in runs.values():
        ledger, _ = step(ledger, Reported(at=now, report=run.report()))
    assert ledger.settled
    return ledger, now


def some_runs(jobs: list[Job]) -> dict[str, Run]:
    return {f"run {i}": Run(job=replace(job, name=f"run {i}"), since=START + i) for i, job in enumerate(jobs)}


@settings(max_examples=25, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=4), jobs, st.randoms())
def test_a_lost_ledger_disturbs_nobody_and_then_decides_as_if_it_had_not_been_lost(
    present: list[Job], newcomer: Job, random: Any
) -> None:
    runs = some_runs(present)
    ledger, now = settled(step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0], runs, START)
    # Reports are values that travel between processes.
    reports = [pickle.loads(pickle.dumps(run.report())) for run in runs.values()]
    random.shuffle(reports)
    late = step(Ledger(started_at=now), ClusterSeen(at=now, nodes=NODES))[0]
    for report in reports:
        late, _ = step(late, Reported(at=now + 1, report=report))
        assert same(late.tenants[report.job.name].lease.holding, report.lease.holding)
    now += REPORT_S
    arrival = Reported(at=now, report=Report(job=replace(newcomer, name="new"), since=now))
    kept, lost = step(ledger, arrival)[0], step(late, arrival)[0]
    assert {n: (t.lease.holding, t.lease.allotment) for n, t in kept.tenants.items()} == {
        n: (t.lease.holding, t.lease.allotment) for n, t in lost.tenants.items()
    }


def test_room_goes_to_a_newcomer_only_once_its_holder_shows_that_it_let_go() -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    old = Run(job=a_job("old"), since=START)
    ledger, now = settled(ledger, {"old": old}, START)
    assert old.holding.worker_count == 4
    urgent = Run(job=a_job("urgent", priority=1, workers=(2, 2)), since=now)
    ledger, changed = step(ledger, Reported(at=now, report=urgent.report()))
    assert changed["old"].holding.worker_count == 2, "at once, without waiting for a round"
    assert changed["urgent"].allotment.holding.worker_count == 2
    assert changed["urgent"].holding == Holding()
    assert "until others let go" in changed["urgent"].reason
    ledger, changed = step(ledger, Reported(at=now, report=old.report()))
    assert changed == {}, "it has not given back anything"
    old.lease = ledger.tenants["old"].lease
    old.give_back()
    ledger, changed = step(ledger, Reported(at=now, report=old.report()))
    assert changed["urgent"].holding.worker_count == 2


def test_a_run_that_was_measured_gets_more_at_once() -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    new = Run(job=a_job("new", step_times={}), since=START)
    ledger, now = settled(ledger, {"new": new}, START)
    assert new.holding.worker_count == 1
    for measured, workers in ((1, 2), (1, 2), (2, 4)):
        new.job = a_job("new", measured_workers=measured, restart_s=0.0)
        ledger, _ = step(ledger, Reported(at=now, report=new.report()))
        assert ledger.tenants["new"].lease.allotment.holding.worker_count == workers, "without waiting for a round"
        new.lease = ledger.tenants["new"].lease
        new.give_back()  # of the cores that nobody else needed
        ledger, _ = step(ledger, Reported(at=now, report=new.report()))
        new.lease = ledger.tenants["new"].lease
        new.take_up(now)
        assert new.holding.worker_count == workers


def test_a_withdrawn_lease_keeps_its_room_until_its_run_knows_of_the_withdrawal() -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    slow = Run(job=a_job("slow"), since=START)
    now = START + REPORT_S
    ledger, _ = step(ledger, Reported(at=now, report=slow.report()))
    slow.lease = ledger.tenants["slow"].lease
    assert slow.lease.holding.worker_count == 4
    urgent = Run(job=a_job("urgent", priority=1, workers=(2, 2)), since=now)
    ledger, _ = step(ledger, Reported(at=now, report=urgent.report()))
    # It still knows the lease of four workers: it holds none, but may be starting them.
    ledger, changed = step(ledger, Reported(at=now, report=slow.report()))
    assert changed == {}
    slow.lease = ledger.tenants["slow"].lease
    ledger, changed = step(ledger, Reported(at=now, report=slow.report()))
    assert changed["urgent"].holding.worker_count == 2


def test_what_a_silent_run_held_goes_to_others_when_the_cluster_shows_it_free() -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    runs = some_runs([a_job("", workers=(4, 4))])
    ledger, now = settled(ledger, runs, START)
    expiry = ledger.tenants["run 0"].lease.expires_at + GRACE_S
    assert expiry == now + LEASE_S + GRACE_S
    waiting = Run(job=a_job("waiting", workers=(4, 4)), since=now)
    for at in (now, expiry - 1):
        ledger, _ = step(ledger, Reported(at=at, report=waiting.report()))
    assert set(ledger.tenants) == {"run 0", "waiting"}
    assert due(ledger) <= expiry
    ledger, changed = step(ledger, Tick(at=expiry))
    assert set(ledger.tenants) == {"waiting"}
    assert changed == {}
    ledger, changed = step(ledger, ClusterSeen(at=expiry, nodes=NODES))
    assert changed["waiting"].holding.worker_count == 4


def test_an_expired_lease_lets_its_run_keep_what_it_holds_and_no_more() -> None:
    ledger = step(Ledger(started_at=START - REPORT_S), ClusterSeen(at=START, nodes=NODES))[0]
    slow = Run(job=a_job("slow"), since=START)
    slow.lease = step(ledger, Reported(at=START, report=slow.report()))[1]["slow"]
    slow.holding = Holding(kind="A", workers={"a": 1})
    assert slow.lease.holding.worker_count == 4
    for at, workers in ((slow.lease.expires_at - 1, 4), (slow.lease.expires_at, 1)):
        fresh, changed = step(Ledger(started_at=at), Reported(at=at, report=slow.report()))
        assert changed["slow"].holding.worker_count == workers
        assert fresh.tenants["slow"].reserved.worker_count == workers


def test_rounds_come_a_minute_apart_unless_somebody_comes_or_changes_what_it_wants() -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    runs = some_runs([a_job(""), a_job("")])
    ledger, now = settled(ledger, runs, START)
    decided = ledger.decided_at
    assert decided is not None
    assert due(ledger) == decided + ROUND_S
    ledger, _ = step(ledger, Reported(at=now, report=runs["run 0"].report()))
    ledger, _ = step(ledger, ClusterSeen(at=now, nodes=NODES))
    assert ledger.decided_at == decided
    changes: list[Event] = [
        Reported(at=now + 1, report=replace(runs["run 0"].report(), job=a_job("run 0", weight=4.0))),
        Reported(at=now + 1, report=Report(job=a_job("new"), since=now)),
        Weighed(at=now + 1, name="run 0", weight=4.0),
        ClusterSeen(at=now + 1, nodes=NODES[:1]),
        ClusterSeen(at=now + 1, nodes=NODES, others={"a": {"CPU": 3.0}}),
        Tick(at=decided + ROUND_S),
    ]
    for change in changes:
        assert step(ledger, change)[0].decided_at == change.at


def test_room_that_a_run_leaves_stays_free_for_a_breath_unless_somebody_waits_for_it() -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    runs = some_runs([a_job("", workers=(1, 2)), a_job("", workers=(1, 4), restart_s=0.0)])
    ledger, now = settled(ledger, runs, START)
    held = runs["run 1"].holding
    at = now + 1
    left, changed = step(ledger, Departed(at=at, name="run 0"))
    assert changed == {}
    assert due(left) == at + BREATH_S
    # Who comes within the breath finds the room free, and who stays is not disturbed.
    newcomer = Reported(at=at + 0.5, report=Report(job=a_job("new", workers=(1, 2)), since=at))
    _, changed = step(left, newcomer)
    assert changed["new"].holding.worker_count
    assert "run 1" not in changed or changed["run 1"].holding.same_workers(held)
    # If nobody comes, who stays takes it.
    _, changed = step(left, Tick(at=at + BREATH_S))
    assert changed["run 1"].holding.worker_count == 4
    # Who waits does not wait longer.
    pinned = some_runs([a_job("", workers=(4, 4), preemptible=False)])
    ledger, now = settled(step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0], pinned, START)
    waits = Report(job=a_job("waits"), since=now)
    ledger, _ = step(ledger, Reported(at=now, report=waits))
    assert not ledger.tenants["waits"].lease.holding.worker_count
    _, changed = step(ledger, Departed(at=now, name="run 0"))
    assert changed["waits"].holding.worker_count == 4


@given(st.sampled_from([0.25, 1.0, 4.0, 100.0]), st.sampled_from([1.0, 3.0]))
def test_a_weight_from_others_counts_as_the_run_s_own(weight: float, own: float) -> None:
    ledger = step(Ledger(started_at=START), ClusterSeen(at=START, nodes=NODES))[0]
    runs = some_runs([a_job("", weight=own), a_job("")])
    ledger, now = settled(ledger, runs, START)
    at, report = now + 1, runs["run 0"].report()
    weighed, changed = step(ledger, Reported(at=at, report=report), Weighed(at=at, name="run 0", weight=weight))
    says_so = replace(report, job=replace(report.job, weight=weight))
    assert changed == step(ledger, Reported(at=at, report=says_so))[1]
    # It outlives the reports of the run, and ends with the run.
    assert step(weighed, Reported(at=at + ROUND_S, report=report))[0].tenants["run 0"].job.weight == weight
    left, _ = step(weighed, Departed(at=at + ROUND_S, name="run 0"))
    again = replace(report, since=at, lease=None)
    assert step(left, Reported(at=at + ROUND_S, report=again))[0].tenants["run 0"].job.weight == own
    assert step(left, Weighed(at=at, name="run 0", weight=weight))[0] == left


def test_runs_that_wait_for_each_other_in_a_circle_get_their_places() -> None:
    """Two runs are to swap their nodes, and neither can start before the other stops."""
    on = {node: Holding(kind="A", workers={node: 2}, cores={node: 2}) for node in ("a", "b")}
    holdings = {"one": on["a"], "two": on["b"]}
    targets = {"one": on["b"], "two": on["a"]}
    for _ in range(4):
        claims = {
            name: Claim(job=a_job(name), allowed=holdings[name], reserved=holdings[name], target=targets[name])
            for name in holdings
        }
        holdings = hand_over(claims, NODES, {})
    assert holdings == targets


def test_workers_do_not_start_before_a_core_is_free_for_their_data() -> None:
    target = Holding(kind="A", workers={"a": 2}, cores={"c": 4})
    before = Holding(kind="A", workers={"b": 1}, cores={"c": 4})
    after = Holding(kind="A", workers={"b": 1}, cores={"b": 4})
    for held, allotted in ((before, Holding()), (after, target)):
        claims = {
            "holder": Claim(job=a_job("holder"), allowed=after, reserved=held, target=after),
            "comes": Claim(job=a_job("comes"), allowed=Holding(), reserved=Holding(), target=target),
        }
        assert hand_over(claims, NODES, {})["comes"] == allotted


def test_a_run_that_keeps_what_it_holds_still_gets_the_cores_that_it_was_promised() -> None:
    now = Holding(kind="A", workers={"a": 2}, cores={"a": 1})
    promised = Holding(kind="A", workers={"a": 2}, cores={"a": 4, "c": 2})
    allotment = Allotment(holding=promised, goodput=None, speedup=None, restarts=False, reason="promised")
    lease = Lease(number=1, holding=now, allotment=allotment, expires_at=START + LEASE_S)
    report = Report(job=a_job("stays", preemptible=False, present=now), since=START, lease=lease)
    ledger, _ = step(Ledger(started_at=START - REPORT_S), Reported(at=START, report=report))
    ledger, changed = step(ledger, ClusterSeen(at=START, nodes=NODES))
    assert ledger.decided_at == START
    assert changed["stays"].holding == changed["stays"].allotment.holding == promised


def test_a_report_is_checked_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match="since of run slow"):
        Report(job=a_job("slow"), since=-1.0)
