"""How fast links carry blocks: what waits on a node behind a slow link is late.

Where it stops: :mod:`offload.pipeline.feed.pool_engine` decides which node gets a task.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

TAU_S = 10.0
"""The time in which a measurement loses all but 1/e of its weight."""

PAUSE_S = 2.0
"""Time without any arrival, behind which the workers do something else: it says nothing about links."""

LEAST_S = 2.0
"""The least time over which arrivals are averaged: a few blocks at the beginning say little about a link."""

OWN_SLACK = 1.5
"""How much more than its measured share a node may have."""

MARGIN = 0.9
"""The share of the measured rate of all links that counts: blocks arrive in jerks, and just behind one the rate seems higher than it is."""

KEEPS_UP = 0.7
"""The least part of what a node makes that a link carries if the node's cores limit the rate."""

LINK_S = 1.0
"""The time that a link should need for one block: small ones fit in before the end of a pass, and tell the pace sooner. Ray sends anew what
has not come after ten seconds, and workers fetch four blocks at a time."""

FIRST_BYTES = 1 << 20
"""The size of the first blocks of a node whose link nobody knows."""


class BlockRoom(NamedTuple):
    """The bytes of a node's next block: above ``most_bytes`` it would be late, and it should have ``good_bytes`` at most."""

    most_bytes: float = math.inf
    good_bytes: float = math.inf


ANY = BlockRoom()
"""No limit."""


class Pace:
    """The bytes per second that arrive at workers from each of the other nodes while any are under way, in an exponential average.
    ``clock`` tells the time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._arrived: dict[str, float] = {}
        self._at = clock()
        self._seconds = 0.0  # the weight of all measurements

    def carried(self, sizes: Mapping[str, int], *, more: bool) -> None:
        """Note the bytes of each other node that have just arrived at a worker, and whether more are under way."""
        with self._lock:
            now = self._clock()
            passed, self._at = min(now - self._at, PAUSE_S), now
            if not (sizes or more):
                return
            fade = math.exp(-passed / TAU_S)
            self._seconds = self._seconds * fade + TAU_S * (1 - fade)
            self._arrived = {node: size * fade for node, size in self._arrived.items()}
            for node, size in sizes.items():
                self._arrived[node] = self._arrived.get(node, 0.0) + size

    def knows(self, node: str) -> bool:
        """Return whether anything of a node has arrived."""
        return node in self._arrived

    def room(
        self,
        node: str,
        *,
        held_bytes: float,
        travelling_bytes: float,
        made_bytes: float,
        far_bytes: float,
        near: Collection[str],
        left_bytes: float,
        near_bytes_per_s: float,
        makes_bytes_per_s: float,
    ) -> BlockRoom:
        """The room for a node's next block, so that links have carried all blocks before the workers' own nodes ``near`` could make the
        rest of ``left_bytes``.

        ``held_bytes``: what no worker has taken of the node's blocks; ``travelling_bytes``: what a worker has taken and has not arrived;
        ``made_bytes``: what the node's tasks make; ``far_bytes``: the sum of the three for all nodes that are not near.
        ``makes_bytes_per_s``: what the node's cores make. A node of which nothing has arrived is late once it holds something.
        """
        with self._lock:
            seconds = max(self._seconds, LEAST_S)
            own = self._arrived.get(node, 0.0) / seconds
            of_all = (sum(self._arrived.values()) - sum(self._arrived.get(home, 0.0) for home in near)) / seconds
        if not own:
            return BlockRoom(0.0 if held_bytes or travelling_bytes else math.inf, FIRST_BYTES)
        if not held_bytes and own >= KEEPS_UP * makes_bytes_per_s:
            return ANY  # nothing waits for this link, whose rate nobody knows then: it carries less than it could
        # A block of x bytes is in time if the link delivers it, and all before it, before the near nodes could make the rest:
        #     (here + x) / rate <= (left - x) / near_rate,  so  x <= (left * rate - here * near_rate) / (near_rate + rate).
        # It must be in time by the node's own link, and by all links together: a few blocks tell little about one link.
        begun_bytes = held_bytes + travelling_bytes + made_bytes
        most = min(
            (left_bytes * rate - here * near_bytes_per_s) / (near_bytes_per_s + rate)
            for here, rate in ((begun_bytes, OWN_SLACK * own), (far_bytes, MARGIN * of_all))
        )
        return BlockRoom(max(most, 0.0), LINK_S * own)
