"""The arbiter between its threads and the ledger: what it answers, and what it takes for others'."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.arbiter import arbiter as arbiter_module
from offload.arbiter.arbiter import Arbiter
from offload.arbiter.handover import amounts
from offload.arbiter.ledger import GRACE_S, Departed, Event, Reported, step
from offload.arbiter.status import History
from offload.arbiter.values import LEASE_S, REPORT_S, Lease, Report
from offload.model.allocation.values import Holding, Rules
from offload.model.others import SETTLED_S, Others
from offload.model.placement import NodeResources
from tests.arbiter.test_ledger import START, a_job

NODES = (
    NodeResources(name="10.0.0.1", node_id="a", cpus=8, gpus=2, gpu_type="A"),
    NodeResources(name="10.0.0.1", node_id="b", cpus=8, gpus=2, gpu_type="A"),
)
DEADLINE_S = 800.0


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def arbiter(clock: Clock) -> Arbiter:
    """One that has seen the cluster and may decide."""
    made = Arbiter(Rules(), clock)
    clock.now += REPORT_S
    made.see(NODES, {})
    return made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def a_report(name: str, holding: Holding | None = None, lease: Lease | None = None, **job: Any) -> Report:
    return Report(job=a_job(name, present=holding or Holding(), **job), since=START, lease=lease)


def test_a_poll_wakes_when_another_run_comes_or_goes(arbiter: Arbiter, threads: ThreadPoolExecutor) -> None:
    lease = arbiter.report(a_report("a"))
    assert lease.holding.worker_count == 4
    assert arbiter.changed("a", lease.number, 0.0) is None
    assert arbiter.changed("a", lease.number - 1, 0.0) == lease
    assert arbiter.changed("nobody", 0, 0.0) is None
    waits = threads.submit(arbiter.changed, "a", lease.number, DEADLINE_S)
    assert arbiter.report(a_report("b")).holding == Holding(), "nothing is free yet"
    less = waits.result(DEADLINE_S)
    assert less is not None
    assert 0 < less.holding.worker_count < 4
    waits = threads.submit(arbiter.changed, "b", 0, DEADLINE_S)
    arbiter.depart("a")
    more = waits.result(DEADLINE_S)
    assert more is not None
    assert more.holding.worker_count > 0


def test_a_late_report_of_a_run_that_has_left_counts_no_more(arbiter: Arbiter) -> None:
    arbiter.report(a_report("a"))
    arbiter.depart("a")
    arbiter.depart("nobody")
    with pytest.raises(LookupError, match="run a has departed"):
        arbiter.report(a_report("a"))
    assert arbiter.status().runs == ()
    # The next run with its name is another one.
    assert arbiter.report(Report(job=a_job("a"), since=START + 1)).holding.worker_count == 4


def test_a_long_decision_keeps_no_run_from_its_lease_and_serves_all_who_came_meanwhile(
    arbiter: Arbiter, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = arbiter.report(a_report("known"))
    begun, go_on = threading.Event(), threading.Event()
    steps: list[tuple[Any, ...]] = []

    def slow_step(ledger: Any, *events: Any) -> Any:
        steps.append(events)
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return step(ledger, *events)

    monkeypatch.setattr(arbiter_module, "step", slow_step)
    monkeypatch.setattr(arbiter_module, "ANSWER_S", 0.0)
    answers: list[Future[Lease]] = [threads.submit(arbiter.report, a_report("new 0"))]
    try:
        assert begun.wait(DEADLINE_S)
        assert arbiter.report(a_report("known")).number == known.number
        assert arbiter.changed("known", known.number, 0.0) is None
        assert [run.name for run in arbiter.status().runs] == ["known"]
        arbiter.see(NODES[:1], {})
        answers += [threads.submit(arbiter.report, a_report(f"new {i}")) for i in range(1, 4)]
        while len(arbiter._events) < 5:  # one of `known`, one of the cluster, three of new runs
            pass
    finally:
        go_on.set()
    assert {answer.result(DEADLINE_S).allotment.reason != "" for answer in answers} == {True}
    assert [len(events) for events in steps] == [1, 5]
    assert len(arbiter.status().runs) == 5


def test_a_step_that_fails_is_no_end(arbiter: Arbiter, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = arbiter.report(a_report("a"))

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("no solver")

    with monkeypatch.context() as broken:
        broken.setattr(arbiter_module, "step", fails)
        with pytest.raises(RuntimeError, match="no solver"):
            arbiter.report(a_report("b"))
    assert arbiter.report(a_report("a", lease=lease)).number == lease.number
    assert arbiter.report(a_report("b")).number >= 0


holdings = st.builds(
    lambda node, workers, cores: Holding(kind="A", workers={node: workers}, cores={node: cores}),
    st.sampled_from(["a", "b"]), st.integers(1, 2), st.integers(0, 4),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(held=holdings, foreign=st.integers(0, 4), lag=st.booleans(), waits=st.lists(st.floats(0.1, 30), max_size=6))
def test_others_hold_what_stays_in_use_beside_the_runs_and_never_what_a_run_holds(
    held: Holding, foreign: int, lag: bool, waits: list[float]
) -> None:
    clock = Clock()
    arbiter = Arbiter(Rules(), clock)
    (node,) = held.workers
    mine = amounts(a_job("run").worker, held)
    busy = {node: {**mine[node], "CPU": mine[node]["CPU"] + min(foreign, 8 - mine[node]["CPU"])}}
    arbiter.see(NODES, busy)  # the run is not known yet: the arbiter was lost
    lease = arbiter.report(a_report("run", held))
    for wait in waits:
        clock.now += wait
        arbiter.see(NODES, {} if lag else busy)
        lease = arbiter.report(a_report("run", held, lease))
        status = arbiter.status()
        for seen in status.nodes:
            assert seen.cpus_of_runs + seen.cpus_of_others <= seen.cpus
            assert seen.gpus_of_runs + seen.gpus_of_others <= seen.gpus
    for _ in range(int(REPORT_S + SETTLED_S) + 2):
        clock.now += 1
        arbiter.see(NODES, busy)
        lease = arbiter.report(a_report("run", held, lease))
    expected = busy[node]["CPU"] - mine[node]["CPU"]
    assert arbiter.status().others == ({node: {"CPU": expected}} if expected else {})


@settings(max_examples=100, deadline=None)
@given(
    looks=st.lists(
        st.tuples(st.sampled_from([1.0, 3.0, 6.0]), st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)))
    )
)
def test_what_others_hold_follows_each_node_that_stays_the_same_for_a_while(
    looks: list[tuple[float, dict[str, int]]],
) -> None:
    others, now, since = Others({}), 0.0, {"a": 0.0, "b": 0.0}
    last: dict[str, int] = {}
    for wait, counts in looks:
        now += wait
        before = others.held
        changed = others.see({node: {"CPU": float(count)} for node, count in counts.items()}, now)
        assert changed == (others.held != before)
        for node in "ab":
            if counts.get(node) != last.get(node):
                since[node] = now
            if now - since[node] >= SETTLED_S:
                assert others.held.get(node, {}).get("CPU", 0) == counts.get(node, 0)
            else:
                assert others.held.get(node) == before.get(node)
        last = counts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 2), max_size=2), max_size=12),
    st.integers(1, 5),
)
def test_the_history_has_one_span_of_a_run_at_a_time_and_forgets_the_oldest(
    looks: list[dict[str, int]], most: int
) -> None:
    history = History(most)
    for at, looked in enumerate(looks):
        history.follow({run: Holding(kind="A", workers={"a": count}) for run, count in looked.items()}, float(at))
        spans = history.spans()
        assert {span.run: span.workers for span in spans if span.until is None} == looked
        assert sum(span.until is not None for span in spans) <= most
        for run in ("x", "y"):
            mine = [span for span in spans if span.run == run]
            for one, other in itertools.pairwise(mine):
                assert one.until is not None
                assert one.since < one.until <= other.since
                assert one.until < other.since or one.workers != other.workers


def test_events_of_one_step_come_to_what_single_steps_come_to() -> None:
    """Of runs that come and go at the same moment."""
    arbiter = Arbiter(Rules(), lambda: START + REPORT_S)
    arbiter.see(NODES, {})
    events: list[Event] = [
        Reported(at=START + REPORT_S, report=a_report("a")),
        Reported(at=START + REPORT_S, report=a_report("b")),
        Departed(at=START + REPORT_S, name="a"),
    ]
    ledger = arbiter._ledger
    together, changed = step(ledger, *events)
    for event in events:
        ledger, _ = step(ledger, event)
    assert together.tenants["b"].lease.allotment == ledger.tenants["b"].lease.allotment
    assert set(changed) == set(together.tenants) == {"b"}


class Host:
    """The clocks of a host, as the module ``time`` has them."""

    def __init__(self) -> None:
        self.wall, self.passed = START, 0.0

    def time(self) -> float:
        return self.wall + self.passed

    def monotonic(self) -> float:
        return self.passed


def test_a_host_whose_clock_is_set_back_shares_on(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(arbiter_module, "time", host)
    arbiter = Arbiter(Rules())
    arbiter.see(NODES, {"a": {"CPU": 8.0, "GPU": 2.0}})  # of another program
    host.passed += REPORT_S
    held = arbiter.report(a_report("a", workers=(1, 4))).holding
    assert set(held.workers) == {"b"}
    host.wall -= 3600.0
    for _ in range(2):  # the other program has ended
        host.passed += SETTLED_S
        arbiter.see(NODES, {})
    assert arbiter.status().others == {}
    assert arbiter.report(a_report("a", held)).expires_at == START + host.passed + LEASE_S
    assert arbiter.due_in_s() <= LEASE_S
    host.passed += LEASE_S + GRACE_S
    assert arbiter.due_in_s() <= 0
    arbiter.tick()
    assert arbiter.status().runs == (), "its reports have stopped"


def test_a_run_at_rest_follows_what_others_hold_at_once() -> None:
    others = Others({})
    assert not others.see({"a": {"CPU": 2.0}}, 0.0)
    assert others.see({"a": {"CPU": 2.0}}, 0.1, at_once=True)
    assert others.held == {"a": {"CPU": 2.0}}
    assert others.see({}, 0.2, at_once=True)
    assert others.held == {}
