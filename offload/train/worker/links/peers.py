"""The ranks of a run, connected by torch.distributed. Small messages always go over gloo on the CPU, so that they neither wait for
the GPU nor make it wait."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from offload.errors import RunError

INTERNAL = "none of these"
"""What offload itself exchanges between the calls of the user's loop."""


class Peers(Protocol):
    """The other ranks, as batches see them."""

    rank: int
    world_size: int

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, in the order of ranks."""

    def broadcast(self, value: Any, source: int) -> Any:
        """``value`` of rank ``source``, on every rank."""


class Talk(Protocol):
    """The connection of all ranks' training threads. All ranks must call each method, in the same order, and for the same ``what``: the
    user's call that it serves, with all that must be equal on the ranks. Else all ranks raise the same RunError, before they exchange
    anything."""

    rank: int
    world_size: int

    def gather_objects(self, mine: Any, what: str = INTERNAL) -> list[Any]:
        """Every rank's object."""

    def broadcast(self, value: Any, source: int) -> Any:
        """``value`` of rank ``source``, on every rank."""

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        """Element-wise sums over the ranks."""


def check_agreed(calls: Sequence[str]) -> None:
    """Raise RunError if the ranks, in their order, serve different calls of the user's loops. If they exchanged values for these, they
    would wait for ever, or take one call's values for those of another."""
    if len(set(calls)) == 1:
        return
    first = calls[0]
    other = next(rank for rank, what in enumerate(calls) if what != first)
    raise RunError(
        "all workers must make the same calls of ctx.report, ctx.sum, ctx.gather and ctx.accumulated, in the same order: "
        f"worker 0 made {first} where worker {other} made {calls[other]}. Call them on all workers; rank 0 alone records a report."
    )


class NoPeers:
    """The :class:`Peers` and the :class:`Talk` of a rank in a world of one."""

    world_size = 1

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine)]

    def gather_objects(self, mine: Any, what: str = INTERNAL) -> list[Any]:
        return [mine]

    def broadcast(self, value: Any, source: int) -> Any:
        return value

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        return list(values)


class DistPeers:
    """A group of all ranks for one kind of message, as :class:`Peers` and as :class:`Talk`.

    All ranks construct it in the same order. Each thread needs its own group: messages of one group keep their order.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")  # type: ignore[assignment]

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        local = torch.tensor(mine, dtype=torch.int64)
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local, group=self._group)
        return [[int(x) for x in part.tolist()] for part in parts]

    def gather_objects(self, mine: Any, what: str = INTERNAL) -> list[Any]:
        """Every rank's object."""
        self._agree(what)
        return self._objects(mine)

    def broadcast(self, value: Any, source: int) -> Any:
        self._agree(INTERNAL)
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        """Element-wise sums over the ranks."""
        self._agree(what)
        # In double precision: sums of metrics over many ranks would lose digits otherwise.
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(x) for x in total.tolist()]

    def _agree(self, what: str) -> None:
        """See :func:`check_agreed`. Its message has one size, whatever the ranks do."""
        mine = zlib.crc32(what.encode())
        if self.gather([mine]) != [[mine]] * self.world_size:
            check_agreed(self._objects(what))

    def _objects(self, mine: Any) -> list[Any]:
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, mine, group=self._group)
        return parts
