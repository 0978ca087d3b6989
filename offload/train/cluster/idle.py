"""CPUs of Ray that this process holds and does not use, which a run of the same process may have, and the connection that both use."""

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
    """Call ``give_back`` whenever a run looks for room. It gives up CPUs that are not in use, and does nothing otherwise."""
    _holders.append(give_back)


def give_back_idle() -> None:
    """Let everything in this process give up the CPUs that it does not use."""
    for give_back in _holders:
        give_back()


def on_end(end: Callable[[], None]) -> None:
    """Call ``end`` whenever no run uses this process's connection to Ray any more. It must not wait."""
    _waiting.append(end)


@contextmanager
def used_by_a_run() -> Iterator[None]:
    """A context in which a run uses this process's connection to Ray, which may be that of others."""
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
    """Whether no run of this process but the caller's uses its connection to Ray."""
    return _runs <= 1


@contextmanager
def unless_used() -> Iterator[bool]:
    """A context in which no run begins to use this process's connection to Ray. Yields whether none uses it: then it may end."""
    with _lock:
        yield not _runs


def _after_fork() -> None:
    global _lock, _runs
    _lock, _runs = threading.Lock(), 0  # another thread may have held it, for as long as Ray takes to end


os.register_at_fork(after_in_child=_after_fork)
