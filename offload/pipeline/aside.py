"""Calls that may take long in C++ (a listing, a storage client), on a thread, so that Ctrl-C or a deadline can end the wait."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

LOOK_S = 0.25

_Result = TypeVar("_Result")


class DeadlineError(Exception):
    """A call took longer than its deadline."""


def call_aside(
    call: Callable[[], _Result], *, meanwhile: Callable[[], None] = lambda: None, deadline_s: float = math.inf
) -> _Result:
    """Return the result of ``call`` or raise its error; call ``meanwhile`` a few times a second until then.

    Raises DeadlineError after ``deadline_s``. The call then goes on, and its result is lost.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True, name="aside").start()
    until = time.monotonic() + deadline_s
    while True:
        try:
            result, error = outcome.get(timeout=LOOK_S)
        except queue.Empty:
            if time.monotonic() > until:
                raise DeadlineError from None
            meanwhile()
            continue
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]


def each_aside(
    call: Callable[[Any], _Result], arguments: list[Any], *, threads: int, done: Callable[[_Result], None]
) -> None:
    """Call with each of the arguments, several at a time, and hand every result to ``done``, on this thread, in any order.

    Unlike threads of :mod:`concurrent.futures`, these do not keep the process from ending. Raises the error of a call.
    """
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    for argument in arguments:
        todo.put(argument)

    def run() -> None:
        while True:
            try:
                argument = todo.get_nowait()
            except queue.Empty:
                return
            try:
                outcomes.put((call(argument), None))
            except BaseException as error:
                outcomes.put((None, error))

    for _ in range(min(threads, len(arguments))):
        threading.Thread(target=run, daemon=True, name="aside").start()
    for _ in arguments:
        result, error = outcomes.get()
        if error is not None:
            while not todo.empty():  # nobody needs these results any more
                try:
                    todo.get_nowait()
                except queue.Empty:
                    break
            raise error
        done(result)


def each_in_order(
    call: Callable[[Any], _Result], arguments: Sequence[Any], *, threads: int, done: Callable[[_Result], None]
) -> None:
    """Do as :func:`each_aside`, with the results in the order of the arguments. Only a few results wait for those before them."""
    ahead = 2 * threads
    early: dict[int, _Result] = {}
    delivered, over = 0, False
    moved = threading.Condition()

    def called(number: int) -> tuple[int, _Result]:
        with moved:
            moved.wait_for(lambda: over or number < delivered + ahead)
            if over:
                raise RuntimeError("nobody needs this result")
        return number, call(arguments[number])

    def hand_over(numbered: tuple[int, _Result]) -> None:
        nonlocal delivered
        number, result = numbered
        early[number] = result
        while delivered in early:
            done(early.pop(delivered))
            with moved:
                delivered += 1
                moved.notify_all()

    try:
        each_aside(called, list(range(len(arguments))), threads=threads, done=hand_over)
    finally:
        with moved:
            over = True
            moved.notify_all()


class SideThread:
    """Repeated calls, one at a time, for a thread that must not wait for them. A context manager: a call still running at its
    exit goes on alone."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._raised: BaseException | None = None

    def __enter__(self) -> SideThread:
        threading.Thread(target=self._run, daemon=True, name="aside").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._calls.put(None)

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return not self._idle.is_set()

    def start(self, call: Callable[[], None]) -> None:
        """Start a call. The previous one must be done."""
        self._idle.clear()
        self._calls.put(call)

    def wait(self, timeout_s: float) -> None:
        """Wait until the call is done, at most ``timeout_s``."""
        self._idle.wait(timeout_s)

    def result(self) -> None:
        """Raise the error of the last call, once."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._raised = error
            self._idle.set()
