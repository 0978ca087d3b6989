"""A task of the pool, the source that it comes from, and its outcome: a block with its cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

import offload.process.ray_forks  # noqa: F401  # a transform may fork
from offload.pipeline.pool.packed_recipe import PackedRecipe

NODE_GONE = ray.exceptions.ActorUnschedulableError


KILLED = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""A process died; of its own accord, or as Ray ended it because the node's memory is nearly full."""


DEAD = (*KILLED, NODE_GONE)


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


@dataclass(frozen=True, kw_only=True)
class Block:
    """A finished block: its reference, its cost, and the node that made it, if known."""

    ref: ray.ObjectRef[Any]
    cost: Cost
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a recipe should process, such as index rows, in an epoch."""

    recipe: PackedRecipe
    rows: Any
    epoch: int


Done = Callable[[Block | BaseException], None]


class Work(Protocol):
    """The source of the pool's tasks. ``run``: the hub's handle, or None."""

    run: Any

    def next_task(self, node: str) -> tuple[Task, Done] | None:
        """The next task for a core of this node, and the function to call with its outcome; None if there is no task now."""

    def failed(self, error: BaseException) -> None:
        """Report that preprocessing cannot go on."""

    def lost(self, node: str, error: BaseException) -> None:
        """Report that a core's process on this node died."""

    def works(self, node: str) -> None:
        """Report that a core of this node has made its first block."""
