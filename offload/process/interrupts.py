"""Make Ctrl-C, SIGTERM and SIGHUP end this process in the same way.

A signal raises KeyboardInterrupt on the main thread, except inside :meth:`Interrupts.shielded`, which only counts it: an exception
must not pass through the start or the end of Ray, which are mostly C++. The command line also has a :class:`LastResort`, which ends
the process and its children if an orderly end takes too long.

Where it stops: the interrupted code itself commits, writes and reports before the end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from offload import uncaught

INTERRUPTED = 130  # exit code after an interruption, by any of the signals
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HELD = (signal.SIGTERM,)
HELD_LOOK_S = 0.2
END_S = 7.0  # time for an orderly end, before the last resort
COMMITTED_END_S = 30.0  # time for it after a committed checkpoint, unless the user has pressed twice
SAID = "offload: ended at once; the same command resumes from the last checkpoint."
SAID_OF_OTHERS = "offload: interrupted."
SHOW_CURSOR = "\x1b[?25h"  # progress bars hide the cursor
LEAVE_SCREEN = "\x1b[?1049l"  # ends a full-screen view


class Interrupts:
    """The count of this process's signals. ``presses``: the number so far."""

    def __init__(self) -> None:
        self.presses = 0
        self.last_resort: LastResort | None = None
        self.installed = False
        self._shields = 0

    def only_count(self) -> None:
        """Only count signals from now on, and raise nothing."""
        self._shields += 1

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came while a shield was up."""
        if self.presses:
            raise _interruption()

    @contextmanager
    def shielded(self, *, patient: bool = False, nothing_to_lose: bool = False) -> Iterator[None]:
        """A context that only counts signals.

        Args:
            patient: whether the first signal gets an orderly answer, however long that takes; otherwise, the last resort's time begins.
            nothing_to_lose: whether the last resort need not wait at all. It also blocks SIGTERM: Ray's C++ handles it while Ray
                starts, and would print a stack.
        """
        self._shields += 1
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD if self.installed and nothing_to_lose else ())
        if self.last_resort is not None:
            self.last_resort.allow(patient=patient, nothing_to_lose=nothing_to_lose)
        try:
            yield
        finally:
            self._shields -= 1
            if self.last_resort is not None:
                self.last_resort.allow()
            if self.installed:  # C++ may have handled a signal meanwhile, without telling Python
                install(self)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def finally_killing(self, kill: Callable[[], None]) -> Iterator[None]:
        """A context in which the last resort also calls ``kill``."""
        if self.last_resort is None:
            yield
            return
        self.last_resort.kills.append(kill)
        try:
            yield
        finally:
            self.last_resort.kills.remove(kill)

    def end_within(self, seconds: float, said: str = SAID, exit_code: int = INTERRUPTED) -> None:
        """Let the last resort wait at most ``seconds`` from now on, and then print ``said``. The first signal shortens that time no more; a
        second one does. Does nothing without a last resort."""
        if self.last_resort is not None:
            self.last_resort.end_within(seconds, said, exit_code)

    def heard(self, signum: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        self.presses += 1
        if self.last_resort is not None:
            self.last_resort.wake()
        if self._shields:
            return
        # An interrupted import of a C++ module may crash.
        if self.last_resort is not None and _imports(frame):
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, RuntimeError):
                    stream.flush()
            self.last_resort.end()
        raise _interruption()


def _interruption() -> KeyboardInterrupt:
    """The error of a signal. If nobody catches it, Python shows the program's own frames."""
    uncaught.install()
    return KeyboardInterrupt()


_of_thread = threading.local()


@contextmanager
def ended_by(interrupts: Interrupts) -> Iterator[None]:
    """A context in which this thread, which gets no signals, obeys the presses of ``interrupts`` instead. Another thread counts them up."""
    _of_thread.interrupts = interrupts
    try:
        yield
    finally:
        del _of_thread.interrupts


def of_this_thread() -> Interrupts:
    """What ends the work of this thread, if it is not the main thread."""
    interrupts = getattr(_of_thread, "interrupts", None)
    return interrupts if isinstance(interrupts, Interrupts) else Interrupts()


@contextmanager
def handled() -> Iterator[Interrupts]:
    """A context with handlers of the signals: the process's own, if it already has such handlers. On other threads than the main
    thread, it handles no signals (see :func:`ended_by`)."""
    if threading.current_thread() is not threading.main_thread():
        yield of_this_thread()
        return
    installed = _installed()
    interrupts = Interrupts() if installed is None else installed
    before = install(interrupts)
    try:
        yield interrupts
    finally:
        interrupts.installed = interrupts is installed
        _restore(before)


def _installed() -> Interrupts | None:
    """The process's own handler of Ctrl-C, if it has one."""
    return _owner(signal.getsignal(signal.SIGINT))


def _owner(handler: Any) -> Interrupts | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Interrupts) else None


def say_interrupted() -> None:
    """Let the last resort of this process say that a command without checkpoints was interrupted."""
    interrupts = _installed()
    if interrupts is not None and interrupts.last_resort is not None:
        interrupts.last_resort.said = SAID_OF_OTHERS


@contextmanager
def on_screen() -> Iterator[None]:
    """A context in which a full-screen view covers the terminal: the last resort ends it before it says anything."""
    interrupts = _installed()
    resort = None if interrupts is None else interrupts.last_resort
    if resort is not None:
        resort.on_screen = True
    try:
        yield
    finally:
        if resort is not None:
            resort.on_screen = False


def install(interrupts: Interrupts) -> dict[signal.Signals, Any]:
    """Install the handlers; return the previous ones. SIGHUP stays ignored if it is already, as under nohup."""
    interrupts.installed = True
    wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupts.heard) for number in wanted}
    _others.update({number: handler for number, handler in before.items() if _owner(handler) is None})
    return before


_others: dict[signal.Signals, Any] = {}
"""The handlers of others that ours have replaced last."""


def _restore(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        # None stands for a handler of C, as where Python is embedded in another program. Python cannot give it back.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


_forking = threading.local()


def _hold_signals() -> None:
    """Hold signals back while this thread forks. Python forgets one that reaches a fork before the fork has the handlers of others."""
    _forking.mask = None if _installed() is None else signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_signals() -> None:
    if (mask := _forking.mask) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    """Give a fork the handlers of others: a signal to the fork is none to this process, whose last resort would end it."""
    ours = [number for number in SIGNALS if _owner(signal.getsignal(number)) is not None]
    if ours and (interrupts := _installed()) is not None and interrupts.last_resort is not None:
        signal.set_wakeup_fd(-1)
        interrupts.last_resort = None
    _restore({number: _others[number] for number in ours})
    _let_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals, after_in_child=_after_fork)


class LastResort(threading.Thread):
    """A thread that ends the process if an orderly end takes too long. It notices signals at once, even while the main thread is busy
    in C++. ``kills``: functions to call before the end. ``on_screen``: whether a full-screen view covers the terminal. ``said``: what it
    says."""

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__(daemon=True, name="last-resort")
        self.kills: list[Callable[[], None]] = []
        self._interrupts = interrupts
        self._woken, self._wake = os.pipe()
        # A signal handler of C writes to it: it must never wait for a full pipe.
        os.set_blocking(self._wake, False)
        self.on_screen = False
        self._patient = self._nothing_to_lose = self._has_limit = False
        self._heard, self._until = 0, float("inf")
        self.said, self._exit_code = SAID, INTERRUPTED
        self._ending = threading.Lock()
        interrupts.last_resort = self
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self.start()

    def allow(self, *, patient: bool = False, nothing_to_lose: bool = False) -> None:
        """See :meth:`Interrupts.shielded`."""
        self._patient, self._nothing_to_lose = patient, nothing_to_lose
        self.wake()

    def end_within(self, seconds: float, said: str, exit_code: int) -> None:
        """See :meth:`Interrupts.end_within`."""
        self.said, self._exit_code, self._has_limit = said, exit_code, True
        self._until = min(self._until, time.monotonic() + seconds)
        self.wake()

    def wake(self) -> None:
        """Check at once whether the time is up."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def all_said(self) -> None:
        """Note that the user knows the reason of the end: the last resort prints nothing more."""
        self.said = ""

    def run(self) -> None:
        """Wait for signals, and for the time limit."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the main thread handles them
        while True:
            held = self._nothing_to_lose and not signal.sigpending().isdisjoint(HELD)
            left_s = self._until - time.monotonic()
            if held or left_s <= 0:
                self.end()
            left_s = min(left_s, HELD_LOOK_S) if self._nothing_to_lose else left_s
            ready, _, _ = select.select([self._woken], [], [], None if left_s == float("inf") else left_s)
            if not ready:
                continue
            self._heard += sum(number in SIGNALS for number in os.read(self._woken, 64))
            waits = self._patient or self._has_limit
            if (heard := max(self._heard, self._interrupts.presses)) and not (waits and heard == 1):
                self._until = min(self._until, time.monotonic() + (0.0 if self._nothing_to_lose else END_S))

    def end(self) -> NoReturn:
        """Call ``kills`` and end the process now."""
        with self._ending:  # never released: a second caller waits for the end
            restore = (LEAVE_SCREEN if self.on_screen else "") + SHOW_CURSOR
            words = (restore if os.isatty(2) else "") + (f"{self.said}\n" if self.said else "")
            with contextlib.suppress(OSError):
                os.write(2, words.encode())
            for kill in self.kills:
                with contextlib.suppress(Exception):
                    kill()
            os._exit(self._exit_code)


def _imports(frame: FrameType | None) -> bool:
    """Return whether the interrupted code is importing a module."""
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
