"""CPUs of Ray that this process has left, and that Ray has not freed yet: it ends a process that is busy only seconds later."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

FREED_S = 20.0  # after that they are free, or others have them
SLACK = 1e-3  # CPUs: sums of Ray's amounts differ in the last decimals

_left: list[tuple[float, Mapping[str, float]]] = []


def leave(cpus: Mapping[str, float]) -> None:
    """Note that this process has just ended what held these CPUs, by node id."""
    _left.append((time.monotonic(), cpus))


def are_free(ask: Callable[[], Mapping[str, float]]) -> bool:
    """Whether all CPUs that this process has left can be among the free ones of the alive nodes, by node id, for which it may ``ask``."""
    earliest = time.monotonic() - FREED_S
    needed: Counter[str] = Counter()
    for when, cpus in _left:
        if when > earliest:
            needed.update(cpus)
    free = ask() if needed else {}
    if any(free[node] < amount - SLACK for node, amount in needed.items() if node in free):
        return False
    _left.clear()
    return True
