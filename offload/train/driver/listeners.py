"""Tell callbacks what happens in a run, each on a thread of its own.

Where it stops: :mod:`offload.train.driver.event_log` says and writes what failed.
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
from offload.report.sentences import sentence
from offload.train.callback import Callback, Checkpoint, Decision, Ended, Interval, Metrics, Started

END_S = 10.0  # time for what callbacks have not handled by the run's end
ERROR_CHARACTERS = 300

Failure = dict[str, Any]


class Listeners:
    """The callbacks of one run. Methods return at once, except :meth:`close`."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._listeners = [_Listener(callback) for callback in callbacks]

    def started(self, run_dir: Path, event: Mapping[str, Any]) -> None:
        """The run has written this ``run_started`` or ``run_resumed``."""
        self._tell("started", lambda: started_of(run_dir, event))

    def interval(self, document: Mapping[str, Any]) -> None:
        """The run has written this line of metrics."""
        self._tell("interval", lambda: interval_of(document))

    def event(self, event: Mapping[str, Any]) -> None:
        """The run has written this event, which some method may stand for."""
        if event["event"] == "report":
            self._tell("metrics", lambda: metrics_of(event))
        elif event["event"] == "checkpoint":
            self._tell("checkpoint", lambda: checkpoint_of(event))
        elif event["event"] in ("decided", "workers_wanted", "cores_wanted"):
            self._tell("decision", lambda: decision_of(event))

    def ended(self, summary: Mapping[str, Any]) -> None:
        """The run has written its summary."""
        self._tell("ended", lambda: ended_of(summary))

    def failures(self) -> list[Failure]:
        """The values of a ``callback_failed`` for each callback that has failed since the last call, the first time only."""
        return [failure for each in self._listeners for failure in each.failures()]

    def close(self, timeout_s: float = END_S) -> None:
        """Wait at most ``timeout_s`` until the callbacks have handled everything."""
        deadline = time.monotonic() + timeout_s
        for each in self._listeners:
            each.finish()
        for each in self._listeners:
            each.wait(deadline)

    def _tell(self, method: str, made: Callable[[], Any]) -> None:
        if self._listeners:
            document = made()
            for each in self._listeners:
                each.tell(method, document)


class _Listener:
    """One callback with its thread and what it still has to hear."""

    def __init__(self, callback: Callback) -> None:
        self._callback, self._name = callback, type(callback).__qualname__
        self._todo: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[Failure] = queue.SimpleQueue()
        self._told = self._handled = 0
        self._said = False
        self._thread = threading.Thread(target=self._work, name=f"offload {self._name}", daemon=True)

    def tell(self, method: str, document: Any) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._told += 1
        self._todo.put((method, document))

    def failures(self) -> list[Failure]:
        found = []
        while not self._failed.empty():
            found.append(self._failed.get())
        return found

    def finish(self) -> None:
        """Let the thread end once everything is handled."""
        self._todo.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until everything is handled. After ``deadline``, count as failed."""
        if self._thread.ident is None:
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._handled < self._told:
            self._fail("ended", "it was still busy when the time for the end of the run was over", "")

    def _work(self) -> None:
        while (told := self._todo.get()) is not None:
            method, document = told
            try:
                with forks.ending_here():
                    getattr(self._callback, method)(document)
            except BaseException as error:  # SystemExit, too: it must not silence the calls that follow
                self._fail(method, _brief(error), traceback.format_exc())
            self._handled += 1

    def _fail(self, method: str, error: str, trace: str) -> None:
        if not self._said:
            self._said = True
            self._failed.put({"callback": self._name, "method": method, "error": error, "traceback": trace})


def _brief(error: BaseException) -> str:
    """The first line of an error, for a sentence."""
    lines = str(error).splitlines()
    said = lines[0][:ERROR_CHARACTERS] if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def started_of(run_dir: Path, event: Mapping[str, Any]) -> Started:
    """The document of a ``run_started`` or ``run_resumed``."""
    return Started(
        at=event["at"],
        run_dir=run_dir,
        resumed=event["event"] == "run_resumed",
        workers=event["workers"],
        preprocessing_cores=event["preprocessing_cores"],
        global_batch_size=event["global_batch_size"],
        local_batch_size=event["local_batch_size"],
        accum_steps=event["accum_steps"],
        nodes=tuple(event["nodes"]),
    )


def interval_of(document: Mapping[str, Any]) -> Interval:
    """The document of a line of ``metrics.jsonl``."""
    names = (
        "at", "epoch", "step", "samples_per_s", "goodput", "stall", "input_ceiling_samples_per_s",
        "device_ceiling_samples_per_s", "workers", "preprocessing_cores", "global_batch_size",
    )  # fmt: skip
    return Interval(**{name: document[name] for name in names}, document=document)


def metrics_of(event: Mapping[str, Any]) -> Metrics:
    """The document of a ``report``."""
    return Metrics(at=event["at"], epoch=event["epoch"], step=event["step"], values=event["metrics"])


def checkpoint_of(event: Mapping[str, Any]) -> Checkpoint:
    """The document of a ``checkpoint``."""
    return Checkpoint(**{name: event[name] for name in ("at", "epoch", "step", "reason", "seconds", "waited")})


def decision_of(event: Mapping[str, Any]) -> Decision:
    """The document of a ``decided``, ``workers_wanted`` or ``cores_wanted``."""
    kind = event["event"]
    return Decision(
        at=event["at"],
        kind=event["decision"] if kind == "decided" else kind,
        reason=event.get("reason") or sentence(kind, event) or "",
        document=event,
    )


def ended_of(summary: Mapping[str, Any]) -> Ended:
    """The document of a summary."""
    return Ended(at=time.time(), status=summary["status"], error=summary["error"], summary=summary)
