"""The nodes that have found no task for their cores: when to ask for them again. Pure.

An answer takes into account what all nodes hold. Where a hundred nodes wait behind slow links, each block that a worker takes may make room
for some of them, and asking for all of them takes longer than the block. So asking in vain takes a limited share of the time.
"""

from __future__ import annotations

SHARE = 0.1
"""The most of the time that questions in vain may take."""


class Refusals:
    """The nodes without a task. Times are in seconds."""

    def __init__(self) -> None:
        self.nodes = set[str]()
        self._looks = False
        self._since = self._spent_s = 0.0

    def add(self, node: str, spent_s: float) -> None:
        """Note that there was no task for a node, which it took so long to find out."""
        self.nodes.add(node)
        self._spent_s += spent_s

    def drop(self, node: str) -> None:
        """Note news of a node: it may be asked for again."""
        self.nodes.discard(node)

    def look(self) -> None:
        """Note news that concern all nodes."""
        self._looks = True

    def due_in(self, now: float) -> float | None:
        """The seconds until all nodes may be asked for again; None: not before there are news."""
        return max(self._since + self._spent_s / SHARE - now, 0.0) if self._looks else None

    def renew(self, now: float) -> None:
        """Forget all nodes if it is time to ask for them again."""
        if self.due_in(now) == 0.0:
            self.nodes.clear()
            self._looks = False
            self._since, self._spent_s = now, 0.0
