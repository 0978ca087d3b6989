"""How fast links carry blocks: what waits on a node behind a slow link is late.

Where it stops: :mod:`offload.pipeline.engines.pool` decides which node gets a task.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

TAU_S = 10.0
"""The time in which a measurement loses all but 1/e of its weight."""

PAUSE_S = 2.0
"""Time without any arrival, behind which the workers do something else: it says nothing about links."""


LEAST_S = 2.0
"""The least time over which arrivals are averaged: a few blocks at the beginning say little about a link."""


OWN_SLACK = 1.5
"""How much more than its measured share a node may have."""


class Pace:
    """The bytes per second that arrive at workers from each node while any arrive, in an exponential average. ``clock`` tells the time in
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._arrived: dict[str, float] = {}
        self._first: float | None = None
        self._at = 0.0
        self._seconds = 0.0  # the weight of all measurements

    def carried(self, sizes: Mapping[str, int]) -> None:
        """Note the bytes of each node that have just arrived at a worker."""
        if not sizes:
            return
        with self._lock:
            now = self._clock()
            if self._first is None:
                self._first = now
            passed, self._at = min(now - max(self._at, self._first), PAUSE_S), now
            fade = math.exp(-passed / TAU_S)
            self._seconds = self._seconds * fade + TAU_S * (1 - fade)
            self._arrived = {node: size * fade for node, size in self._arrived.items()}
            for node, size in sizes.items():
                self._arrived[node] = self._arrived.get(node, 0.0) + size

    def would_be_late(
        self,
        node: str,
        *,
        held: Mapping[str, float],
        made: Mapping[str, float],
        left_bytes: float,
        near_bytes_per_s: float,
    ) -> bool:
        """Whether the workers' own nodes could make ``left_bytes`` before links have carried what other nodes hold and make.

        ``held``, ``made``: the bytes on each of these other nodes, and of their tasks under way. A node of which nothing has arrived is
        late once it holds something.
        """
        with self._lock:
            if node not in self._arrived:
                return held[node] > 0
            seconds = max(self._seconds, LEAST_S)
            all_arrived = sum(self._arrived.get(each, 0.0) for each in held)
            # Of one node, a few blocks tell little. What all links carry together is known sooner.
            for here, arrived in (
                (held[node] + made[node], OWN_SLACK * self._arrived[node]),
                (sum(held.values()) + sum(made.values()), all_arrived),
            ):
                if here * near_bytes_per_s * seconds > left_bytes * arrived:
                    return True
            return False
