"""Calls that may take long in C++ (a listing, a storage's client), on a thread: Ctrl-C and a deadline end the wait for them."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

LOOK_S = 0.25

_Made = TypeVar("_Made")


class DeadlineError(Exception):
    """A call was not done in time."""


def call_aside(
    call: Callable[[], _Made], *, meanwhile: Callable[[], None] = lambda: None, deadline_s: float = math.inf
) -> _Made:
    """Return what ``call`` returns, or raise what it raises; call ``meanwhile`` some times a second until then.

    Raises DeadlineError after ``deadline_s``. The call then goes on, and nobody hears of its end.
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
            made, error = outcome.get(timeout=LOOK_S)
        except queue.Empty:
            if time.monotonic() > until:
                raise DeadlineError from None
            meanwhile()
            continue
        if error is not None:
            raise error
        return made  # type: ignore[no-any-return]


def each_aside(
    call: Callable[[Any], _Made], arguments: list[Any], *, threads: int, done: Callable[[_Made], None]
) -> None:
    """Call with each of the arguments, several at a time, and hand every result to ``done``, on this thread and in no order.

    Unlike those of :mod:`concurrent.futures` the threads do not keep the process from ending. Raises what a call raises.
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
        made, error = outcomes.get()
        if error is not None:
            while not todo.empty():  # what nobody needs any more
                try:
                    todo.get_nowait()
                except queue.Empty:
                    break
            raise error
        done(made)
