"""The cores with room for a task, those with the fewest tasks first. Pure.

A run may have a thousand cores, and asks for one with each block: no operation looks at all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class FreeCores(Generic[C]):
    """The cores with fewer than ``most`` tasks under way, by node."""

    def __init__(self, most: int) -> None:
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
            if not here:
                del self._levels[tasks][node]

    def first(self, refused: Collection[str] = ()) -> C | None:
        """The core with the fewest tasks, on any node but the ``refused`` ones; None if there is none."""
        for level in self._levels:
            for node, here in level.items():
                if node not in refused:
                    return next(iter(here))
        return None
