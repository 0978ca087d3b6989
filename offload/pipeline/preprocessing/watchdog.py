"""Watch a preprocessing process, report slow samples, and interrupt those that exceed their deadline.

The process works on its main thread, which a data set may block forever. Another thread watches it. Where it stops: a call that
neither Python nor a signal can interrupt ends with its process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

SLOW_S = 60.0  # time after which the process reports a sample; again after twice the time, and so on
GRACE_S = 10.0  # time for an interrupted call to end
LOOK_S = 0.5
GIVEN_UP = 71  # exit status of a process that could not be interrupted


class SampleTimeoutError(BaseException):
    """A sample took longer than its deadline. It is not an ``Exception``, so that data sets that catch exceptions do not catch it."""


class SlowCallReports(Protocol):
    """The receiver of reports about slow calls."""

    def slow(self, what: str, seconds: float) -> None:
        """Report that ``what`` has already taken this many seconds."""

    def given_up(self, what: str, seconds: float) -> None:
        """Report that ``what`` missed its deadline and cannot be interrupted: the process ends."""


@dataclass(eq=False)
class _Doing:
    what: Callable[[], str]
    deadline_s: float | None
    began: float
    tell_after_s: float = field(default=SLOW_S)
    interrupted: bool = False


class Watch:
    """The watch of one process. The working thread calls :meth:`doing` and :meth:`idle`, another calls :meth:`look`.

    Args:
        reports: the receiver of reports about slow calls.
        now: a clock, in seconds.
    """

    def __init__(self, reports: SlowCallReports, now: Callable[[], float] = time.monotonic) -> None:
        self._reports, self._now = reports, now
        self._doing: _Doing | None = None

    def start(self) -> None:
        """Look regularly, from a new thread. If this is the main thread, allow the watch to interrupt its calls."""
        if threading.current_thread() is threading.main_thread():
            global _interrupting
            signal.signal(signal.SIGALRM, self._interrupt)
            _interrupting = self
        threading.Thread(target=self._run, args=(threading.get_ident(),), daemon=True, name="watch").start()

    def doing(self, what: Callable[[], str], deadline_s: float | None = None) -> None:
        """Note that the process begins ``what``, which should end within ``deadline_s``."""
        # A single assignment, which needs no lock: this happens for every sample.
        self._doing = _Doing(what, deadline_s, self._now())

    def idle(self) -> None:
        """Note that the process has finished."""
        self._doing = None

    def look(self, interrupt: Callable[[], None]) -> None:
        """Report a slow call, and ``interrupt`` a call that is past its deadline."""
        doing = self._doing
        if doing is None:
            return
        seconds = self._now() - doing.began
        if doing.deadline_s is not None and seconds >= doing.deadline_s:
            if not doing.interrupted:
                doing.interrupted = True
                interrupt()
            elif seconds >= doing.deadline_s + GRACE_S:
                self._reports.given_up(doing.what(), doing.deadline_s)
        elif seconds >= doing.tell_after_s:
            doing.tell_after_s *= 2
            self._reports.slow(doing.what(), seconds)

    def _run(self, thread: int) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look(lambda: signal.pthread_kill(thread, signal.SIGALRM))

    def _interrupt(self, signum: int, frame: object) -> None:
        doing = self._doing
        # The call may have ended just before the signal came. Its successor must not pay for it.
        if doing is not None and doing.interrupted:
            raise SampleTimeoutError


_interrupting: Watch | None = None


def watch_of_process() -> Watch | None:
    """The watch that interrupts the calls of this process's main thread. None if it has none."""
    return _interrupting


class NoReports:
    """Ignores slow calls. A process that cannot be interrupted ends all the same."""

    def slow(self, what: str, seconds: float) -> None: ...

    def given_up(self, what: str, seconds: float) -> None:
        os._exit(GIVEN_UP)
