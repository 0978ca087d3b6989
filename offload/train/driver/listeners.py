"""Tell callbacks what happens in a run, each on a thread of its own.

Where it stops: :mod:`offload.train.driver.event_log` reports failed callbacks.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.process import forks
from offload.report.events.decisions import CoreCountWanted, Decided, WorkerCountWanted
from offload.report.events.event import RunEvent
from offload.report.events.faults import CallbackFailed
from offload.report.events.training import CheckpointWritten, MetricsReported, RunResumed, RunStarted
from offload.train.callback import Callback, Checkpoint, Decision, Ended, Interval, Metrics, Started

END_S = 10.0  # time that callbacks get after the run's end to handle what is left
ERROR_CHARACTERS = 300

Choice = Decided | WorkerCountWanted | CoreCountWanted
"""The events that callbacks receive as decisions."""


class Listeners:
    """The callbacks of one run. Methods return at once, except :meth:`close`."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._listeners = [_Listener(callback) for callback in callbacks]

    def started(self, run_dir: Path, event: RunStarted) -> None:
        """The run has written the event with which a session begins."""
        self._tell("started", lambda: started_of(run_dir, event))

    def interval(self, document: Mapping[str, Any]) -> None:
        """The run has written this line of metrics."""
        self._tell("interval", lambda: interval_of(document))

    def event(self, event: RunEvent) -> None:
        """The run has written this event, for which callbacks may have a method."""
        match event:
            case MetricsReported():
                self._tell("metrics", lambda: metrics_of(event))
            case CheckpointWritten():
                self._tell("checkpoint", lambda: checkpoint_of(event))
            case Decided() | WorkerCountWanted() | CoreCountWanted():
                self._tell("decision", lambda: decision_of(event))

    def ended(self, summary: Mapping[str, Any]) -> None:
        """The run has written its summary."""
        self._tell("ended", lambda: ended_of(summary))

    def failures(self) -> list[CallbackFailed]:
        """The callbacks that have failed for the first time since the last call."""
        return [failure for listener in self._listeners for failure in listener.failures()]

    def close(self, timeout_s: float = END_S) -> None:
        """Wait at most ``timeout_s`` until the callbacks have handled everything."""
        deadline = time.monotonic() + timeout_s
        for listener in self._listeners:
            listener.finish()
        for listener in self._listeners:
            listener.wait(deadline)

    def _tell(self, method: str, make: Callable[[], Any]) -> None:
        if self._listeners:
            document = make()
            for listener in self._listeners:
                listener.tell(method, document)


class _Listener:
    """One callback, its thread, and the queue of documents that it has not handled."""

    def __init__(self, callback: Callback) -> None:
        self._callback, self._name = callback, type(callback).__qualname__
        self._todo: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[CallbackFailed] = queue.SimpleQueue()
        self._queued = self._handled = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"offload {self._name}", daemon=True)

    def tell(self, method: str, document: Any) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._queued += 1
        self._todo.put((method, document))

    def failures(self) -> list[CallbackFailed]:
        failures = []
        while not self._failed.empty():
            failures.append(self._failed.get())
        return failures

    def finish(self) -> None:
        """Let the thread end once everything is handled."""
        self._todo.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until everything is handled. A callback that is still busy at ``deadline`` counts as failed."""
        if self._thread.ident is None:
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._handled < self._queued:
            self._fail("ended", "it was still busy when the time for the end of the run was over", "")

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            method, document = call
            try:
                with forks.ending_here():
                    getattr(self._callback, method)(document)
            except BaseException as error:  # even SystemExit must not prevent the calls that follow
                self._fail(method, _brief(error), traceback.format_exc())
            self._handled += 1

    def _fail(self, method: str, error: str, trace: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._failed.put(CallbackFailed(callback=self._name, method=method, error=error, traceback=trace))


def _brief(error: BaseException) -> str:
    """The first line of an error, for a sentence."""
    lines = str(error).splitlines()
    first = lines[0][:ERROR_CHARACTERS] if lines else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def started_of(run_dir: Path, event: RunStarted) -> Started:
    """The document of a session's start."""
    return Started(
        at=event.at,
        run_dir=run_dir,
        resumed=isinstance(event, RunResumed),
        workers=event.workers,
        preprocessing_cores=event.preprocessing_cores,
        global_batch_size=event.global_batch_size,
        local_batch_size=event.local_batch_size,
        accum_steps=event.accum_steps,
        nodes=tuple(event.nodes),
    )


def interval_of(document: Mapping[str, Any]) -> Interval:
    """The document of a line of ``metrics.jsonl``."""
    names = (
        "at", "epoch", "step", "samples_per_s", "goodput", "stall", "input_ceiling_samples_per_s",
        "device_ceiling_samples_per_s", "workers", "preprocessing_cores", "global_batch_size",
    )  # fmt: skip
    return Interval(**{name: document[name] for name in names}, document=document)


def metrics_of(event: MetricsReported) -> Metrics:
    """The document of reported metrics."""
    return Metrics(at=event.at, epoch=event.epoch, step=event.step, values=event.metrics)


def checkpoint_of(event: CheckpointWritten) -> Checkpoint:
    """The document of a written checkpoint."""
    return Checkpoint(
        at=event.at,
        epoch=event.epoch,
        step=event.step,
        reason=event.reason,
        seconds=event.seconds,
        waited=event.waited,
    )


def decision_of(event: Choice) -> Decision:
    """The document of a decision, or of a request for more or fewer nodes, whose sentence is the reason."""
    kind, reason = (event.decision, event.reason) if isinstance(event, Decided) else (event.kind, event.sentence({}))
    return Decision(at=event.at, kind=kind, reason=reason, document=event.to_json())


def ended_of(summary: Mapping[str, Any]) -> Ended:
    """The document of a summary."""
    return Ended(at=time.time(), status=summary["status"], error=summary["error"], summary=summary)
