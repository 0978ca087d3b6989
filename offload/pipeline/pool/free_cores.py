"""Which core gets the next task: those with room for one, and the nodes that have found none. Pure.

A run may have a thousand cores, and asks for one with each block: no operation looks at all of them. An answer to "is there a task for this
node" takes into account what all nodes hold. Where a hundred nodes wait behind slow links, each block that a worker takes may make room for
some of them, and asking for all of them takes longer than the block. So asking in vain takes a limited share of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

import offload.process.ray_forks  # noqa: F401  # a transform may fork

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
        """Note news that concerns all nodes."""
        self._looks = True

    def due_in(self, now: float) -> float | None:
        """The seconds until all nodes may be asked for again; None: not before there is news."""
        # The questions of a round may take SHARE of the time until the next one.
        return max(self._since + self._spent_s / SHARE - now, 0.0) if self._looks else None

    def renew(self, now: float) -> None:
        """Forget all nodes if it is time to ask for them again."""
        if self.due_in(now) == 0.0:
            self.nodes.clear()
            self._looks = False
            self._since, self._spent_s = now, 0.0


C = TypeVar("C", bound=Hashable)


class FreeCores(Generic[C]):
    """The cores with fewer than ``most`` tasks under way, by node."""

    def __init__(self, most: int) -> None:
        # A dict at the lowest level, not a set: it keeps the order in which cores became free, so all get their turn.
        self._levels: list[dict[str, dict[C, None]]] = [{} for _ in range(most)]  # by the number of tasks, then by node
        self._level_of: dict[C, tuple[int, str]] = {}

    def put(self, core: C, node: str, tasks: int) -> None:
        """Note that a core of this node has so many tasks under way."""
        self.remove(core)
        if tasks < len(self._levels):
            self._levels[tasks].setdefault(node, {})[core] = None
            self._level_of[core] = tasks, node

    def remove(self, core: C) -> None:
        """Forget a core, known or not: it takes no tasks."""
        if core in self._level_of:
            tasks, node = self._level_of.pop(core)
            here = self._levels[tasks][node]
            del here[core]
            # An empty node would be looked at again with every question.
            if not here:
                del self._levels[tasks][node]

    def first(self, refused: Collection[str] = ()) -> C | None:
        """The core with the fewest tasks, on any node but the ``refused`` ones; None if there is none."""
        for level in self._levels:
            for node, here in level.items():
                if node not in refused:
                    return next(iter(here))
        return None
