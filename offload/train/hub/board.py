"""The part of the hub to which workers report and which the driver reads.

Workers push measurements and events, and get the driver's newest orders in return. Ray Train's controller asks the board how many
workers to start. Where it stops: the board decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from offload.adapt.failures import failures_per_s
from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.report.events import HUB, OutOfMemory, RunEvent, WorkerLost
from offload.train.messages import GroupStart, GroupStatus, News, Orders, Push, sum_of

FAILURES = 2  # worker failures on a node within FORGET_S before it counts as failing
FORGET_S = 3600.0
FRUITLESS = 3  # attempts in a row without progress


class Board:
    """The workers' reports and the driver's orders. Its methods run on several threads.

    Args:
        rates, cores, speeds, process_bytes, spent: functions that return the :class:`News` fields of these names.
        nodes: the number of nodes of the cluster, for the expected rate of failures.
    """

    def __init__(
        self,
        rates: Callable[[], dict[str, dict[str, float]]] = dict,
        cores: Callable[[], tuple[int, int]] = lambda: (0, 0),
        speeds: Callable[[], dict[str, dict[str, float]]] = dict,
        process_bytes: Callable[[], int] = int,
        spent: Callable[[], dict[str, tuple[int, float]]] = dict,
        *,
        nodes: int = 1,
    ) -> None:
        self._rates_now, self._cores_now, self._speeds_now = rates, cores, speeds
        self._process_bytes_now, self._spent_now = process_bytes, spent
        self._board = threading.Lock()
        self._changed = threading.Condition(self._board)
        self._totals: dict[int, Totals] = {}
        self._past: list[tuple[int, Totals]] = []
        self._metrics: dict[str, float] = {}
        self._events: list[RunEvent] = []
        self._dropped = 0  # the number of events before these
        self._epoch = self._step = self._samples = 0
        self._group = GroupStatus()
        self._orders = Orders()
        self._attempt = 0
        self._running = False
        self._committed = self._handed_over = 0  # attempts of the last groups that were ready to end, and that ended
        self._failed = 0  # attempt of the last group of which a worker died
        self._most_local: int | None = None
        self._node_of: dict[int, str] = {}
        self._failed_at: dict[str, list[float]] = {}
        self._suspects: tuple[str, ...] = ()
        self._nodes, self._began_at, self._failures = nodes, time.monotonic(), 0
        self._fruitless, self._furthest = 0, -1

    # -- the driver ------------------------------------------------------------------------------------------------

    def publish(self, orders: Orders) -> None:
        """Make these the current orders, unless newer ones have arrived: Ray does not keep the order of calls."""
        with self._changed:
            if orders.serial > self._orders.serial:
                self._orders = orders
                self._changed.notify_all()

    def read(self, cursor: int) -> News:
        """The news since ``cursor``. The events before it are forgotten: its only reader has them, and a long run has many."""
        with self._board:
            read = max(cursor - self._dropped, 0)
            del self._events[:read]
            self._dropped += read
            return News(
                cursor=self._dropped + len(self._events),
                totals=dict(self._totals),
                past=tuple(self._past),
                epoch=self._epoch,
                step=self._step,
                samples=self._samples,
                metrics=dict(self._metrics),
                events=tuple(self._events),
                group=self._group,
                attempts=self._attempt,
                rates=self._rates_now(),
                cores=self._cores_now(),
                running=self._running,
                failures=self._failures,
                suspects=self._suspects,
                most_local=self._most_local,
                failing=tuple(node for node, at in self._failed_at.items() if len(at) >= FAILURES),
                worker_nodes=tuple(set(self._node_of.values())),
                speeds=self._speeds_now(),
                process_bytes=self._process_bytes_now(),
                spent=self._spent_now(),
            )

    def note(self, event: RunEvent) -> None:
        """Add an event that no worker reports."""
        with self._board:
            self._events.append(event.reported(time.time(), HUB))

    # -- the workers -----------------------------------------------------------------------------------------------

    def begin_group(self) -> GroupStart:
        """Start a worker group; its totals begin at zero."""
        with self._board:
            if self._totals:
                self._past.append((max(self._group.workers, 1), sum_of(self._totals)))
            self._totals.clear()
            self._node_of.clear()
            self._group = GroupStatus()
            self._running = False
            self._attempt += 1
            rate = failures_per_s(self._failures, time.monotonic() - self._began_at, self._nodes)
            return GroupStart(
                attempt=self._attempt, orders=self._orders, failures_per_s=rate, most_local=self._most_local
            )

    def push(self, push: Push) -> Orders:
        """Record a rank's report; return the newest orders."""
        with self._board:
            self._totals[push.rank] = push.totals
            self._node_of[push.rank] = push.node
            if push.rank == 0:
                self._epoch, self._step, self._samples = push.epoch, push.step, push.samples
                self._group = push.group
                # After a death, the others report until Ray Train ends them, but never train again.
                self._running = push.group.workers > 0 and self._attempt > self._failed
                self._metrics.update(push.metrics)
            self._events.extend(push.events)
            return self._orders

    def ready_to_end(self, attempt: int) -> None:
        """Note rank 0's report that all ranks of its group have committed and wait for their end."""
        with self._changed:
            self._committed = attempt
            self._changed.notify_all()

    def out_of_memory(self, rank: int, split: BatchSplit) -> bool:
        """Halve the limit of local batches: one did not fit into the device's memory. Return False if the limit cannot be halved
        further."""
        with self._board:
            most = min(split.local_batch_size // 2, self._most_local or split.local_batch_size)
            if most < 1:
                return False
            smaller = split.with_local_at_most(most)
            event = OutOfMemory(
                did_not_fit=split.local_batch_size,
                local_batch_size=smaller.local_batch_size,
                accum_steps=smaller.accum_steps,
            )
            self._events.append(event.reported(time.time(), rank))
            self._most_local = most
            return True

    # -- Ray Train's controller ------------------------------------------------------------------------------------

    def workers_to_start(self, timeout_s: float) -> int:
        """The number of workers to start; 0 for none now. After a failure, the driver first looks at the remaining nodes."""
        with self._changed:
            self._changed.wait_for(self._may_start, timeout_s)
            return self._orders.workers if self._may_start() else 0

    def _may_start(self) -> bool:
        return self._orders.workers > 0 and self._orders.failures_seen >= self._failures

    def workers_to_replace_with(self, timeout_s: float) -> int:
        """The number of workers that replace the present ones, once these are ready to end.

        It is 0 if they are not ready in time, or if no orders end them. Each group gets one answer: Ray Train may ask again before the
        next workers have begun.
        """
        with self._changed:
            if self._orders.end_of(self._attempt) != "resize":
                return 0
            self._changed.wait_for(self._may_be_replaced, timeout_s)
            if not self._may_be_replaced():
                return 0
            self._handed_over = self._attempt
            return self._orders.workers

    def _may_be_replaced(self) -> bool:
        ready = self._orders.without_commit or self._committed == self._attempt
        return ready and self._orders.workers > 0 and self._handed_over < self._attempt

    def worker_failed(self, reason: str, ranks: Sequence[int] = ()) -> bool:
        """Note that processes of these ranks died. Without ranks, one died, and only its peers have noticed so far.

        Return whether to try again; False after several attempts in a row without progress.
        """
        self.note(WorkerLost(reason=reason))
        with self._changed:
            self._failures += 1
            self._running, self._failed = False, self._attempt
            now = time.monotonic()
            died_on = {self._node_of[rank] for rank in ranks if rank in self._node_of}
            self._suspects = tuple(died_on if ranks else set(self._node_of.values()))
            for node in died_on:
                recent = [at for at in self._failed_at.get(node, []) if now - at < FORGET_S]
                self._failed_at[node] = [*recent, now]
            self._fruitless = 0 if self._step > self._furthest else self._fruitless + 1
            self._furthest = max(self._furthest, self._step)
            return self._fruitless < FRUITLESS

    def nodes_to_avoid(self) -> tuple[str, ...]:
        """The nodes that should hold no worker."""
        return self._orders.avoid
