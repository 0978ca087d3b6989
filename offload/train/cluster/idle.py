"""Idle CPUs that this process holds on Ray, which a run in the same process may take over, and the connection that both share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload.process.interrupts import handled

_holders: list[Callable[[], None]] = []
_waiting: list[Callable[[], None]] = []
_lock = threading.Lock()
_runs = 0


def on_need(give_back: Callable[[], None]) -> None:
    """Call ``give_back`` whenever a run looks for room. It must release idle CPUs, and do nothing if all are in use."""
    _holders.append(give_back)


def give_back_idle() -> None:
    """Release the idle CPUs of all holders in this process."""
    for give_back in _holders:
        give_back()


def on_end(end: Callable[[], None]) -> None:
    """Call ``end`` whenever no run uses this process's connection to Ray any more. It must not wait."""
    _waiting.append(end)


@contextmanager
def used_by_a_run() -> Iterator[None]:
    """A context in which a run uses this process's connection to Ray, which loaders may share."""
    global _runs
    with _lock:
        _runs += 1
    try:
        yield
    finally:
        with handled() as interrupts, interrupts.shielded():
            with _lock:
                _runs -= 1
                over = not _runs
            if over:
                for end in _waiting:
                    end()


def is_alone() -> bool:
    """Return whether no run of this process but the caller's uses its connection to Ray."""
    return _runs <= 1


@contextmanager
def unless_used() -> Iterator[bool]:
    """A context in which no run can begin to use this process's connection to Ray. Yields whether it is unused; if so, it may end."""
    with _lock:
        yield not _runs


def _after_fork() -> None:
    global _lock, _runs
    _lock, _runs = threading.Lock(), 0  # another thread may have held it, for as long as Ray takes to end


os.register_at_fork(after_in_child=_after_fork)
