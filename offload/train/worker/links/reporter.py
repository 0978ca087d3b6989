"""The worker's connection to the hub: measurements, events and the user's output go out, the driver's newest orders come back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from offload.actors.errors import lost_errors
from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.report.events import RunEvent, WorkerHung, WorkerWaits
from offload.train.hub.client import HubClient
from offload.train.messages import End, GroupStart, GroupStatus, Orders, Push
from offload.train.worker.links.hang_watchdog import Watchdog

HUNG = 70  # exit status of a process that hung
PATIENCE_S = 60.0  # before the user hears that a call waits for other workers, which may never make it


class Reporter:
    """A thread that pushes to the hub every ``interval_s`` seconds, and at once on request. It ends the process if ``watchdog`` finds
    that it hangs.

    Args:
        hub: the hub of the run.
        rank: the rank of this worker.
        start: the start of its group.
        node: the id of this worker's node.

    ``before_push``: a function that may report more events before each push.
    """

    def __init__(
        self,
        hub: HubClient,
        rank: int,
        start: GroupStart,
        watchdog: Watchdog | None = None,
        *,
        node: str,
        interval_s: float = 2.0,
    ) -> None:
        self.orders: Orders = start.orders
        self.totals = Totals()
        self.group = GroupStatus()
        self.epoch = self.step = self.samples = 0
        self._hub, self._rank, self._start, self._interval_s = hub, rank, start, interval_s
        self._node = node
        self._watchdog = watchdog
        self._told_waiting = ""
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._events: list[RunEvent] = []
        self.before_push: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reporter")
        self._thread.start()

    @property
    def end(self) -> End:
        """How the newest orders end this worker group."""
        return self.orders.end_of(self._start.attempt)

    @property
    def split(self) -> BatchSplit | None:
        """The newest orders' split of global batches, within the device's memory; None: no change."""
        split = self.orders.split
        return None if split is None else split.with_local_at_most(self._start.most_local)

    def event(self, event: RunEvent) -> None:
        """Report an event, for ``events.jsonl``."""
        with self._lock:
            self._events.append(event.reported(time.time(), self._rank))

    def metrics(self, values: dict[str, float]) -> None:
        """Report the newest values of the user's metrics, for the live line."""
        with self._lock:
            self._metrics.update(values)

    def flush(self) -> None:
        """Push now, and learn the newest orders."""
        before_push = self.before_push  # another thread may reset it
        if before_push is not None:
            before_push()
        with self._lock:
            events, self._events = tuple(self._events), []
            push = Push(
                rank=self._rank,
                totals=self.totals,
                epoch=self.epoch,
                step=self.step,
                samples=self.samples,
                node=self._node,
                group=self.group,
                metrics=dict(self._metrics),
                events=events,
            )
        self.orders = self._hub.push(push)

    def close(self) -> None:
        """Push the rest and end the thread."""
        self._ended.set()
        self._thread.join(timeout=5)
        self.flush()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._watch()
                self.flush()
            except lost_errors():
                return  # the driver is gone; this process ends with it

    def _watch(self) -> None:
        if self._watchdog is None:
            return
        # From this thread: the training thread may never return from its call.
        call = self._watchdog.call_waiting(PATIENCE_S)
        if call and call != self._told_waiting:
            self.event(WorkerWaits(call=call, seconds=PATIENCE_S))
        self._told_waiting = call
        where = self._watchdog.hung_at()
        if where is None:
            return
        self.event(WorkerHung(deadline_s=self._watchdog.deadline_s, where=where))
        self.flush()
        os._exit(HUNG)  # nothing else ends a thread that hangs
