"""A task of the pool, the source that it comes from, and its outcome: a block with its cost.

A sample's way through these types: a :class:`TaskSource` cuts index rows into an :class:`Assignment`, whose :class:`Task` travels to the
process of a core. The process returns a :class:`Block`, and the pool hands it to the assignment, which knows where it belongs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from offload.pipeline.pool.packed_recipe import PackedRecipe


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A task's output and its cost for the core, without imports and set-up.

    ``cpu_s`` counts from the end of the previous task if this one followed at once. ``process_bytes`` is the private memory of the
    process after the task; 0: unknown. ``blocked_s``: the seconds of ``wall_s`` in which the task neither ran nor waited for a core: it
    waited for files or other programs. NaN: unknown. ``cache_bytes`` and ``storage_bytes``: what came from the node's cache and from
    storage, of data sets with a cache. ``first_wait_s``: how long it waited for the first file from storage.
    """

    rows: int
    size_bytes: int
    cpu_s: float
    wall_s: float
    process_bytes: int = 0
    blocked_s: float = math.nan
    cache_bytes: int = 0
    storage_bytes: int = 0
    first_wait_s: float = 0.0

    @property
    def work_s(self) -> float:
        """The seconds by which tasks are sized. Not CPU time alone: a task that mostly waits for storage is not short."""
        return max(self.cpu_s, self.wall_s / 2)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A finished block: its reference, its cost, and the node that made it, if known."""

    ref: Any
    cost: Cost
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a recipe should process, such as index rows, in an epoch."""

    recipe: PackedRecipe
    rows: Any
    epoch: int


class Assignment(Protocol):
    """A task for a core, and the receiver of its outcome. The pool calls one of the two methods, once, on its own thread. A task whose
    process dies runs again first. For a task that nobody wants any more (:meth:`Pool.abandon`), it calls neither."""

    @property
    def task(self) -> Task:
        """The task."""

    def finished(self, block: Block) -> None:
        """Take the block of the task."""

    def failed(self, error: BaseException) -> None:
        """Note that the task raised this error, or that its processes died again and again."""


class TaskSource(Protocol):
    """The source of the pool's tasks, and the receiver of its reports.

    Args:
        handle: the handle of this process's actor, to which preprocessing processes report; None if there is none.
    """

    handle: Any

    def next_task(self, node: str) -> Assignment | None:
        """The next task for a core of this node; None if there is none now."""

    def failed(self, error: BaseException) -> None:
        """Report that preprocessing cannot go on."""

    def lost(self, node: str, error: BaseException) -> None:
        """Report that a core's process on this node died."""

    def works(self, node: str) -> None:
        """Report that a core of this node has made its first block."""
