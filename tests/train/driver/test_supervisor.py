"""The supervisor against groups that a test plays: what it starts, when it ends a group, and what comes next."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from offload.errors import RunError
from offload.train.driver import supervisor as supervisor_module
from offload.train.driver.supervisor import Supervisor, WorkerError
from offload.train.group.group import Died, Ended, GroupEvent, Joining, NotStarted, Plan
from offload.train.group.in_worker import Main, Member, Report
from offload.train.messages import Orders
from offload.train.worker.steps.device_memory import DeviceMemoryError

DEADLINE_S = 800.0


def work(member: Member) -> str:
    raise AssertionError("a test plays the workers")


class PlayedGroup:
    """A group whose events a test tells."""

    def __init__(self, plan: Plan, tell: Callable[[GroupEvent], None]) -> None:
        self.plan, self._tell = plan, tell
        self.ended: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def joins(self) -> PlayedGroup:
        nodes = tuple(f"node {rank}" for rank in range(self.plan.workers))
        self._tell(Joining(attempt=self.plan.attempt, nodes=nodes))
        return self

    def cannot_start(self) -> None:
        self._tell(NotStarted(attempt=self.plan.attempt, reason="no such image"))

    def returns(self, outcome: str) -> None:
        for rank in range(self.plan.workers):
            self.reports(rank, Report(outcome=outcome))

    def reports(self, rank: int, report: Report) -> None:
        self._tell(Ended(attempt=self.plan.attempt, rank=rank, report=report))

    def raises(self, rank: int, error: BaseException) -> None:
        self.reports(rank, Report(error=error, trace="the traceback"))

    def dies(self, rank: int) -> None:
        self._tell(Died(attempt=self.plan.attempt, rank=rank, reason="ActorDiedError"))

    def has_ended(self) -> bool:
        return self.ended.get(timeout=DEADLINE_S)

    # -- as the supervisor sees it

    def how_ended(self, rank: int) -> str | None:
        return f"worker {rank} was killed"

    def end(self) -> None:
        self.ended.put(True)


class Play:
    """A supervisor, the groups that it starts, and the failures of which the hub hears. ``again``: the hub's answers."""

    def __init__(self, *again: bool, max_failures: int = 0) -> None:
        self.failures: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._again = list(again)
        self._groups: queue.SimpleQueue[PlayedGroup] = queue.SimpleQueue()
        self._serial = 0
        self.supervisor = Supervisor(self, self, max_failures=max_failures)
        self.supervisor.start(work)

    def orders(self, workers: int, **other: Any) -> None:
        self._serial += 1
        self.supervisor.obey(Orders(serial=self._serial, workers=workers, **other))

    def group(self) -> PlayedGroup:
        """The next group that the supervisor starts."""
        return self._groups.get(timeout=DEADLINE_S)

    def none_starts(self) -> bool:
        return self._groups.empty()

    def result(self) -> str:
        return self.supervisor.training.result(DEADLINE_S)

    # -- as the supervisor sees it

    def start(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None]) -> PlayedGroup:
        group = PlayedGroup(plan, tell)
        self._groups.put(group)
        return group

    def worker_failed(self, reason: str, nodes: Sequence[str], suspects: Sequence[str]) -> bool:
        self.failures.put((reason, tuple(nodes), set(suspects)))
        return self._again.pop(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a better explanation, unless a test says so."""
    monkeypatch.setattr(supervisor_module, "EXCEPTION_S", 0.0)
    monkeypatch.setattr(supervisor_module, "CONNECTION_S", 0.0)


@pytest.mark.parametrize("outcome", ["finished", "stopped"])
def test_a_group_trains_to_its_end(outcome: str) -> None:
    play = Play()
    play.orders(2, avoid=("a",))
    group = play.group().joins()
    assert group.plan == Plan(attempt=1, workers=2, avoid=("a",))
    group.returns(outcome)
    assert play.result() == outcome
    assert group.has_ended()


def test_a_group_that_makes_way_is_followed_by_one_of_the_newest_orders() -> None:
    play = Play()
    play.orders(1)
    first = play.group().joins()
    play.orders(0, ends_group=1)
    first.returns("replaced")
    assert first.has_ended()
    play.orders(3, ends_group=1)
    assert play.group().plan == Plan(attempt=2, workers=3)


def test_workers_that_cannot_commit_any_more_are_replaced_at_once() -> None:
    play = Play()
    play.orders(2)
    first = play.group().joins()
    play.orders(1, ends_group=1, without_commit=True)
    assert first.has_ended()
    assert play.group().plan == Plan(attempt=2, workers=1)


def test_older_orders_that_arrive_late_change_nothing() -> None:
    play = Play()
    play.supervisor.obey(Orders(serial=5, workers=2))
    play.supervisor.obey(Orders(serial=4, workers=1))
    assert play.group().plan.workers == 2


def test_a_dead_worker_is_replaced_once_the_driver_has_looked_at_the_cluster() -> None:
    play = Play(True)
    play.orders(2)
    group = play.group().joins()
    group.dies(1)
    assert group.has_ended()
    assert play.failures.get(timeout=DEADLINE_S) == ("worker 1 was killed", ("node 1",), {"node 1"})
    play.orders(2)  # these orders were made before
    assert play.none_starts()
    play.orders(1, failures_seen=1)
    assert play.group().plan == Plan(attempt=2, workers=1)


def test_peers_that_only_notice_a_death_are_suspects_and_nobody_is_blamed() -> None:
    play = Play(True)
    play.orders(2)
    group = play.group().joins()
    group.raises(0, RuntimeError("gloo: Connection closed by peer"))
    assert play.failures.get(timeout=DEADLINE_S)[1:] == ((), {"node 0", "node 1"})


def test_failures_without_progress_end_the_run() -> None:
    play = Play(False)
    play.orders(1)
    play.group().joins().dies(0)
    with pytest.raises(RunError, match="several times in a row: worker 0 was killed; the same command tries again"):
        play.result()


def test_workers_that_cannot_start_are_tried_again_and_then_end_the_run() -> None:
    play = Play(True, False)
    play.orders(1)
    play.group().cannot_start()
    play.orders(1, failures_seen=1)
    play.group().cannot_start()
    with pytest.raises(RunError, match="the workers could not start: no such image"):
        play.result()


def test_an_exception_of_the_users_function_ends_the_run_after_as_many_as_are_allowed() -> None:
    play = Play(max_failures=1)
    play.orders(1)
    for _ in range(2):
        play.group().joins().raises(0, ValueError("a bad batch"))
    with pytest.raises(WorkerError, match="on rank 0:\nthe traceback") as raised:
        play.result()
    assert isinstance(raised.value.__cause__, ValueError)


def test_smaller_batches_are_tried_at_once_and_count_as_no_failure() -> None:
    play = Play()
    play.orders(2)
    play.group().joins().raises(1, DeviceMemoryError("too large"))
    play.group().joins().returns("finished")
    assert play.result() == "finished"
    assert play.failures.empty()


def test_orders_overtake_a_group_that_has_not_begun() -> None:
    play = Play()
    play.orders(2)
    first = play.group()
    play.orders(1, avoid=("a",))
    assert first.has_ended()
    second = play.group()
    assert second.plan == Plan(attempt=2, workers=1, avoid=("a",))
    play.orders(0)
    assert second.has_ended()
    play.orders(1, stop=True)
    assert play.result() == "stopped"


def test_a_stop_lets_a_group_that_has_begun_commit() -> None:
    play = Play()
    play.orders(1)
    group = play.group().joins()
    play.orders(1, stop=True)
    group.returns("stopped")
    assert play.result() == "stopped"


def test_events_of_an_earlier_group_mean_nothing() -> None:
    play = Play(True)
    play.orders(1)
    first = play.group().joins()
    first.dies(0)
    play.orders(1, failures_seen=1)
    second = play.group().joins()
    first.dies(0)
    second.returns("finished")
    assert play.result() == "finished"


def test_after_the_end_of_the_run_no_group_starts() -> None:
    play = Play()
    play.supervisor.close(DEADLINE_S)
    play.orders(1)
    assert play.result() == "stopped"
    assert play.none_starts()


def test_the_end_of_the_run_ends_the_group() -> None:
    play = Play()
    play.orders(1)
    group = play.group().joins()
    play.supervisor.close(DEADLINE_S)
    assert group.has_ended()
    assert play.result() == "stopped"


def test_a_hub_that_is_gone_ends_the_run() -> None:
    play = Play()  # its answer to a failure is an IndexError
    play.orders(1)
    play.group().joins().dies(0)
    with pytest.raises(IndexError):
        play.result()
