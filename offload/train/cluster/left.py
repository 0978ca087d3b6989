"""CPUs that this process has given up but Ray has not freed yet: Ray takes seconds to end a busy process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

FREED_S = 20.0  # time after which the CPUs are free, or others have taken them
SLACK = 1e-3  # CPUs: sums of Ray's amounts differ in the last decimals

_left: list[tuple[float, Mapping[str, float]]] = []


def leave(cpus: Mapping[str, float]) -> None:
    """Note that this process has just ended the holders of these CPUs, by node id."""
    _left.append((time.monotonic(), cpus))


def are_free(ask: Callable[[], Mapping[str, float]]) -> bool:
    """Return whether Ray may have freed all CPUs that this process has left: each alive node has at least as many free ones.

    ``ask`` returns the free CPUs of the alive nodes, by node id. It is only called if this process has left CPUs recently.
    """
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
