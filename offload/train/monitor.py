"""The run's notice board: part of an actor that workers write to and the driver reads.

Workers push what they measured and what happened; the answer tells them whether to stop. The driver polls and writes the
run directory. Where it stops: nothing is decided here.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from offload.measure.steps import Totals


@dataclass(frozen=True, kw_only=True)
class Push:
    """What one rank tells: its totals since it started, how far the run is (steps, samples of all ranks), and news since the
    last push."""

    rank: int
    totals: Totals
    epoch: int
    step: int
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class News:
    """What the driver gets: each rank's newest totals, what each data set's preprocessing was measured at, and all events
    since ``cursor``."""

    cursor: int
    totals: dict[int, Totals]
    epoch: int
    step: int
    samples: int
    metrics: dict[str, float]
    events: tuple[dict[str, Any], ...]
    rates: dict[str, dict[str, float]] = field(default_factory=dict)


class Monitor:
    """What the actor answers. Its methods run on several threads. ``rates``: where to ask for the data sets' rates."""

    def __init__(self, rates: Callable[[], dict[str, dict[str, float]]] = dict) -> None:
        self._rates_now = rates
        self._board = threading.Lock()
        self._totals: dict[int, Totals] = {}
        self._metrics: dict[str, float] = {}
        self._events: list[dict[str, Any]] = []
        self._epoch = self._step = self._samples = 0
        self._stop = False

    def push(self, push: Push) -> bool:
        """Take in what a rank tells; returns whether the run is to stop."""
        with self._board:
            self._totals[push.rank] = push.totals
            if push.rank == 0:
                self._epoch, self._step, self._samples = push.epoch, push.step, push.samples
                self._metrics.update(push.metrics)
            self._events.extend(push.events)
            return self._stop

    def read(self, cursor: int) -> News:
        """Everything since ``cursor``."""
        with self._board:
            return News(
                cursor=len(self._events),
                totals=dict(self._totals),
                epoch=self._epoch,
                step=self._step,
                samples=self._samples,
                metrics=dict(self._metrics),
                events=tuple(self._events[cursor:]),
                rates=self._rates_now(),
            )

    def stop(self) -> None:
        """From now on tell the workers to stop."""
        self._stop = True


class Reporter:
    """A worker's side: pushes every ``interval_s`` from a thread, and at once when asked."""

    def __init__(self, monitor: Any, rank: int, interval_s: float = 2.0) -> None:
        self.stop = threading.Event()
        self.totals = Totals()
        self.epoch = self.step = self.samples = 0
        self._monitor, self._rank, self._interval_s = monitor, rank, interval_s
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._events: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reporter")
        self._thread.start()

    def event(self, kind: str, **values: Any) -> None:
        """Something happened; goes to ``events.jsonl``."""
        with self._lock:
            self._events.append({"event": kind, "at": time.time(), "rank": self._rank, **values})

    def metrics(self, values: dict[str, float]) -> None:
        """The newest values of the user's metrics, for the live line."""
        with self._lock:
            self._metrics.update(values)

    def flush(self) -> None:
        """Push now, and learn whether to stop."""
        with self._lock:
            events, self._events = tuple(self._events), []
            push = Push(
                rank=self._rank,
                totals=self.totals,
                epoch=self.epoch,
                step=self.step,
                samples=self.samples,
                metrics=dict(self._metrics),
                events=events,
            )
        if ray.get(self._monitor.push.remote(push)):
            self.stop.set()

    def close(self) -> None:
        """Push what is left and end the thread."""
        self._ended.set()
        self._thread.join(timeout=5)
        self.flush()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self.flush()
            except ray.exceptions.RayError:
                return  # the driver is gone; the worker will be stopped


class Forward(io.TextIOBase):
    """A text stream that forwards whole lines to the driver, and to the worker's own log."""

    def __init__(self, reporter: Reporter, log: Any) -> None:
        self._reporter, self._log = reporter, log
        self._rest = ""

    def write(self, text: str) -> int:
        self._log.write(text)
        lines, _, self._rest = (self._rest + text).rpartition("\n")
        if lines:
            self._reporter.event("print", text=lines)
        return len(text)

    def flush(self) -> None:
        self._log.flush()
