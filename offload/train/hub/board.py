"""The part of the hub to which workers report and which the driver reads.

Workers push measurements and events, and get the driver's newest orders in return. Where it stops: the board decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from offload.adapt.failures import failures_per_s
from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.pipeline.feed.feed import Supply
from offload.report.events.event import HUB, RunEvent
from offload.report.events.faults import OutOfMemory, WorkerLost
from offload.train.messages import GroupStart, GroupStatus, News, Orders, Push, sum_of

FAILURES = 2  # worker failures on a node within FORGET_S before it counts as failing
FORGET_S = 3600.0
# Not one: a second failure in a row may be chance. Not many: a program that always fails would restart forever.
FRUITLESS = 3  # attempts in a row without progress


class _EventQueue:
    """Events on their way to the driver, their only reader."""

    def __init__(self) -> None:
        self.waiting: list[RunEvent] = []
        self._forgotten = 0  # the number of events before these

    def since(self, cursor: int) -> tuple[int, tuple[RunEvent, ...]]:
        """The next cursor, and all events from this one on. The events before it are forgotten: a long run has many."""
        # Not what this call returns: the answer may be lost on its way, and the driver asks again with the same cursor.
        read = max(cursor - self._forgotten, 0)
        del self.waiting[:read]
        self._forgotten += read
        return self._forgotten + len(self.waiting), tuple(self.waiting)


class _Reports:
    """What the ranks have reported: the present group's totals and progress, and the totals of earlier groups."""

    def __init__(self) -> None:
        self.totals: dict[int, Totals] = {}  # by rank
        self.past: list[tuple[int, Totals]] = []  # each group's number of workers, and the totals of all its ranks
        self.node_of: dict[int, str] = {}  # by rank
        self.group = GroupStatus()
        self.metrics: dict[str, float] = {}
        self.epoch = self.step = self.samples = 0

    @property
    def worker_nodes(self) -> set[str]:
        """The nodes from which ranks of the present group have reported."""
        return set(self.node_of.values())

    def begin_group(self) -> None:
        """Begin at zero for a new group. The progress of training stays."""
        # The rates of a past group still tell how long steps take at its size, so they are not lost with it.
        if self.totals:
            self.past.append((max(self.group.workers, 1), sum_of(self.totals)))
        self.totals.clear()
        self.node_of.clear()
        self.group = GroupStatus()

    def add(self, push: Push) -> None:
        """Record the report of a rank. Rank 0 reports the progress of all."""
        self.totals[push.rank] = push.totals
        self.node_of[push.rank] = push.node
        if push.rank == 0:
            self.epoch, self.step, self.samples = push.epoch, push.step, push.samples
            self.group = push.group
            self.metrics.update(push.metrics)


class _WorkerFailures:
    """The deaths of workers: how many, on which nodes, and whether training made progress in between. ``nodes``: the number of nodes of the
    cluster."""

    def __init__(self, nodes: int) -> None:
        self.count = 0
        self.suspects: tuple[str, ...] = ()
        self._nodes, self._began_at = nodes, time.monotonic()
        self._failed_at: dict[str, list[float]] = {}  # by node, within FORGET_S
        self._fruitless, self._furthest_step = 0, -1

    @property
    def per_s(self) -> float:
        """The estimated rate of failures."""
        return failures_per_s(self.count, time.monotonic() - self._began_at, self._nodes)

    @property
    def failing_nodes(self) -> tuple[str, ...]:
        """The nodes on which workers failed repeatedly."""
        return tuple(node for node, times in self._failed_at.items() if len(times) >= FAILURES)

    def add(self, reports: _Reports, nodes: Collection[str], suspects: Collection[str]) -> bool:
        """Note that processes died on these ``nodes``, and that these ``suspects`` should show a sign of life. Return whether to try
        again."""
        self.count += 1
        now = time.monotonic()
        self.suspects = tuple(suspects)
        for node in nodes:
            # The window slides: a node that failed an hour ago, and has worked since, is as good as any.
            recent = [failed_at for failed_at in self._failed_at.get(node, []) if now - failed_at < FORGET_S]
            self._failed_at[node] = [*recent, now]
        self._fruitless = 0 if reports.step > self._furthest_step else self._fruitless + 1
        self._furthest_step = max(self._furthest_step, reports.step)
        return self._fruitless < FRUITLESS


class Board:
    """The workers' reports and the driver's orders. Its methods run on several threads.

    Args:
        supply: returns the measurements of preprocessing, for the driver.
        nodes: the number of nodes of the cluster, for the expected rate of failures.
    """

    def __init__(self, supply: Callable[[], Supply] = Supply, *, nodes: int = 1) -> None:
        self._supply = supply
        self._lock = threading.Lock()  # guards all below
        self._called = threading.Condition(self._lock)
        self._calls = 0
        self._events = _EventQueue()
        self._reports = _Reports()
        self._failures = _WorkerFailures(nodes)
        self._begun = self._failed = 0  # the newest group that has started, and the newest of which a worker died
        self._orders = Orders()
        self._running = False
        self._most_local: int | None = None

    # -- the driver ------------------------------------------------------------------------------------------------

    def publish(self, orders: Orders) -> None:
        """Make these the current orders, unless newer ones have arrived: Ray does not keep the order of calls."""
        with self._lock:
            if orders.serial > self._orders.serial:
                self._orders = orders

    def read(self, cursor: int) -> News:
        """The news since ``cursor``. The events before it are forgotten: its only reader has them, and a long run has many."""
        # Before the lock: the feed has locks of its own, and two locks that are taken in two orders could block each
        # other.
        supply = self._supply()
        with self._lock:
            reports = self._reports
            next_cursor, events = self._events.since(cursor)
            return News(
                cursor=next_cursor,
                totals=dict(reports.totals),
                past=tuple(reports.past),
                epoch=reports.epoch,
                step=reports.step,
                samples=reports.samples,
                metrics=dict(reports.metrics),
                events=events,
                group=reports.group,
                attempts=self._begun,
                rates=supply.rates,
                cores=supply.cores,
                let_go=supply.let_go,
                running=self._running,
                failures=self._failures.count,
                suspects=self._failures.suspects,
                most_local=self._most_local,
                failing=self._failures.failing_nodes,
                worker_nodes=tuple(reports.worker_nodes),
                speeds=supply.speeds,
                process_bytes=supply.process_bytes,
                spent=supply.spent,
            )

    def note(self, event: RunEvent) -> None:
        """Add an event that no worker reports."""
        with self._lock:
            self._events.waiting.append(event.reported(time.time(), HUB))

    def await_calls(self, seen: int, timeout_s: float) -> int:
        """Wait until workers have called for the driver more than ``seen`` times; return how often they have. It returns after
        ``timeout_s`` at the latest."""
        with self._called:
            self._called.wait_for(lambda: self._calls > seen, timeout_s)
            return self._calls

    # -- the workers -----------------------------------------------------------------------------------------------

    def begin_group(self, attempt: int) -> GroupStart:
        """Start the worker group of this attempt; its totals begin at zero."""
        with self._lock:
            self._reports.begin_group()
            self._running = False
            self._begun = attempt
            return GroupStart(
                attempt=attempt,
                orders=self._orders,
                failures_per_s=self._failures.per_s,
                most_local=self._most_local,
            )

    def push(self, push: Push) -> Orders:
        """Record a rank's report; return the newest orders."""
        with self._lock:
            self._reports.add(push)
            if push.rank == 0:
                # After a death, the others report until they are ended, but never train again.
                self._running = push.group.workers > 0 and self._begun > self._failed
            self._events.waiting.extend(push.events)
            return self._orders

    def call_driver(self) -> None:
        """Let the driver look at the news at once: a worker waits for its orders."""
        with self._called:
            self._calls += 1
            self._called.notify_all()

    def out_of_memory(self, rank: int, split: BatchSplit) -> bool:
        """Halve the limit of local batches: one did not fit into the device's memory. Return False if the limit cannot be halved
        further."""
        with self._lock:
            # Several ranks may report the same batch: the limit is half of what did not fit, not half of the last limit.
            most = min(split.local_batch_size // 2, self._most_local or split.local_batch_size)
            if most < 1:
                return False
            smaller = split.with_local_at_most(most)
            event = OutOfMemory(
                did_not_fit=split.local_batch_size,
                local_batch_size=smaller.local_batch_size,
                accum_steps=smaller.accum_steps,
            )
            self._events.waiting.append(event.reported(time.time(), rank))
            self._most_local = most
            return True

    # -- the supervisor of the workers -----------------------------------------------------------------------------

    def worker_failed(self, reason: str, nodes: Collection[str], suspects: Collection[str]) -> bool:
        """Note that processes of the group died on these ``nodes``; none if only their peers have noticed so far. ``suspects``: the
        nodes that should show a sign of life before workers start there again.

        Return whether to try again; False after several attempts in a row without progress.
        """
        self.note(WorkerLost(reason=reason))
        with self._lock:
            self._running, self._failed = False, self._begun
            return self._failures.add(self._reports, nodes, suspects)
