"""Carry out the orders to the workers: start a group, watch it, end it, start the next.

The run's state machine (:mod:`offload.train.driver.fleet`) decides how many workers train; :mod:`offload.train.driver.losses` judges how
an attempt ended. The supervisor waits for messages alone: orders from the driver, events from the group.

Where it stops: where processes run is the group's business (:mod:`offload.train.group`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, assert_never

from offload.errors import RunError
from offload.process import forks
from offload.process.exits import how_it_ended
from offload.train.driver.losses import AllReturned, Lost, Raised, SmallerBatches, Verdict, verdict_of
from offload.train.group.group import Died, Ended, Group, GroupEvent, Groups, Joining, NotStarted, Plan
from offload.train.group.in_worker import Main
from offload.train.messages import Orders
from offload.train.worker.links.reporter import HUNG

# The time for a better explanation to arrive. The death of a process reaches the driver within milliseconds, if its node lives.
EXCEPTION_S = 1.0
CONNECTION_S = 2.0


class FailurePort(Protocol):
    """The part of the hub's client that the supervisor needs."""

    def worker_failed(self, reason: str, nodes: Sequence[str], suspects: Sequence[str]) -> bool:
        """See :class:`offload.train.hub.client.HubClient`."""


class WorkerError(Exception):
    """What the function of a rank raised, which is its cause. ``trace``: the traceback in the worker."""

    def __init__(self, rank: int, trace: str) -> None:
        super().__init__(rank, trace)
        self.rank, self.trace = rank, trace

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n{self.trace}"


@dataclass(frozen=True)
class _Closed:
    """The run is over."""


@dataclass
class _Attempt:
    """A group and what it has told. ``nodes``: by rank, once its function begins."""

    plan: Plan
    group: Group
    ends: dict[int, Ended | Died]
    nodes: tuple[str, ...] = ()
    not_started: str = ""

    @property
    def begun(self) -> bool:
        return bool(self.nodes)


class Supervisor:
    """The workers of a run, from the first group to the last.

    Args:
        groups: starts groups.
        hub: hears of failures.
        max_failures: how often an exception of the user's function may start the workers again; below 0: without a limit.
        changed: called when an attempt has ended, and when training has, from the supervisor's thread.

    Attributes:
        training: how the training ended, ``"finished"`` or ``"stopped"``, or the error that ended it.
        rests: the serial of the orders by which no worker runs now, and none may start; None while some run.
        newest: the plan of the newest group, which may still be starting; None before the first. All earlier groups have ended.
    """

    def __init__(
        self,
        groups: Groups,
        hub: FailurePort,
        *,
        max_failures: int = 0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.training: Future[str] = Future()
        self.rests: int | None = None
        self.newest: Plan | None = None
        self._changed = changed
        self._groups, self._hub, self._max_failures = groups, hub, max_failures
        # The only way in: all other state belongs to the supervisor's thread, and needs no lock.
        self._inbox: queue.SimpleQueue[Orders | GroupEvent | _Closed] = queue.SimpleQueue()
        self._orders = Orders()
        self._attempts = self._failures = self._raised = 0
        self._closed = False
        # Between `close` and the start of a thread or a group: nothing may start once the run is closed.
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def obey(self, orders: Orders) -> None:
        """Follow these orders from now on. Returns at once."""
        self._inbox.put(orders)

    def start(self, main: Main) -> None:
        """Train with workers that call ``main``. Returns at once."""
        with self._starting:
            if not self._closed:
                self._thread = threading.Thread(target=self._work, args=(main,), daemon=True, name="supervisor")
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End all workers and start none from now on. Wait at most ``timeout_s`` for that."""
        with self._starting:
            self._closed = True
        self._inbox.put(_Closed())
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self, main: Main) -> None:
        try:
            with forks.ending_here():
                outcome = self._train(main)
        except BaseException as error:
            self.training.set_exception(error)
        else:
            self.training.set_result(outcome)
        self._changed()

    def _train(self, main: Main) -> str:
        while True:
            self._await(lambda: self._over or self._may_start)
            if self._over:
                return "stopped"  # no group runs, and the last one has committed
            if end := self._attempt(main):
                return end
            self._changed()

    @property
    def _over(self) -> bool:
        return self._closed or self._orders.stop

    @property
    def _may_start(self) -> bool:
        """Whether workers may start. After a failure, the driver first looks at the remaining nodes."""
        return self._orders.workers > 0 and self._orders.failures_seen >= self._failures

    # -- one attempt -----------------------------------------------------------------------------------------------

    def _attempt(self, main: Main) -> str:
        """Start a group and follow it to its end. Return how training ended; "" if another group follows."""
        self._attempts += 1
        orders = self._orders
        plan = Plan(attempt=self._attempts, workers=orders.workers, avoid=orders.avoid, homes=orders.homes)
        with self._starting:
            if self._closed:
                return "stopped"
            self.newest = plan
            self._changed()
            attempt = _Attempt(plan, self._groups.start(main, plan, self._inbox.put), {})
        try:
            verdict = self._follow(attempt)
        except BaseException:
            attempt.group.end()
            raise
        attempt.group.end()
        match verdict:
            case None:
                return ""
            case AllReturned():
                return "" if verdict.outcome == "replaced" else verdict.outcome
            case SmallerBatches():
                return ""
            case Lost():
                self._lost(attempt, verdict)
                return ""
            case Raised():
                self._raise(attempt, verdict)
                return ""
            case _ as never:
                assert_never(never)

    def _follow(self, attempt: _Attempt) -> Verdict | None:
        """Wait for the verdict on an attempt; None if orders have overtaken it."""
        settles_at: float | None = None
        while True:
            if self._overtaken(attempt):
                return None
            if attempt.not_started:
                return Lost(ranks=(), reason=f"the workers could not start: {attempt.not_started}")
            settled = settles_at is not None and time.monotonic() >= settles_at
            verdict = verdict_of(attempt.ends, attempt.plan.workers, settled=settled)
            if not isinstance(verdict, str):
                return verdict
            # The time counts from the first sign. Further exceptions do not prolong it.
            if verdict and settles_at is None:
                settles_at = time.monotonic() + (EXCEPTION_S if verdict == "exception" else CONNECTION_S)
            self._take(attempt, None if settles_at is None else max(settles_at - time.monotonic(), 0.0))

    def _overtaken(self, attempt: _Attempt) -> bool:
        """Return whether the newest orders end this attempt without its own doing."""
        orders, plan = self._orders, attempt.plan
        if self._closed:
            return True
        # Nothing is trained yet, so a group that starts with outdated orders ends without a commit.
        if not attempt.begun:
            return orders.stop or (orders.workers, orders.avoid, orders.homes) != (plan.workers, plan.avoid, plan.homes)
        return not orders.stop and orders.without_commit and orders.end_of(plan.attempt) == "resize"

    def _take(self, attempt: _Attempt, timeout_s: float | None) -> None:
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        match message:
            case Orders() | _Closed():
                self._hear(message)
            case _ if message.attempt != attempt.plan.attempt:
                pass  # of a group that has ended
            case Joining():
                attempt.nodes = message.nodes
            case NotStarted():
                attempt.not_started = message.reason
            case Ended() | Died():
                attempt.ends[message.rank] = message
            case _ as never:
                assert_never(never)

    def _await(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.rests = self._orders.serial
            self._changed()
            message = self._inbox.get()
            if isinstance(message, Orders | _Closed):
                self._hear(message)
        self.rests = None

    def _hear(self, message: Orders | _Closed) -> None:
        if isinstance(message, _Closed):
            self._closed = True
        elif message.serial >= self._orders.serial:
            self._orders = message

    # -- failures --------------------------------------------------------------------------------------------------

    def _lost(self, attempt: _Attempt, lost: Lost) -> None:
        """Report lost processes. Raises RunError after several attempts in a row without progress."""
        rank = lost.ranks[0] if lost.ranks else None
        how = (None if rank is None else attempt.group.how_ended(rank)) or lost.reason
        died_on = tuple({attempt.nodes[rank] for rank in lost.ranks})
        # Ranks that only noticed a death are asked for a sign of life, but none of their nodes is blamed.
        again = self._hub.worker_failed(how, died_on, died_on or tuple(set(attempt.nodes)))
        # Counted here and in the hub: the driver's orders name the number that it has seen, and no group starts
        # before.
        self._failures += 1
        if again:
            return
        remedy = "the same command tries again from the last checkpoint"
        if how_it_ended(HUNG) in how:
            remedy = (
                "it made no progress for hang_s. If it waits for another worker, the loops differ: all workers must call "
                "ctx.report, ctx.sum, ctx.gather and ctx.backward equally often"
            )
        raise RunError(f"training failed several times in a row: {how}; {remedy}.")

    def _raise(self, attempt: _Attempt, raised: Raised) -> None:
        """Raise the exception of the user's function, unless it may start again."""
        self._raised += 1
        if self._max_failures < 0 or self._raised <= self._max_failures:
            return
        end = attempt.ends[raised.rank]
        assert isinstance(end, Ended)
        raise WorkerError(raised.rank, end.report.trace) from end.report.error
