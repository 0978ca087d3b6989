"""The ranks of a run, connected by torch.distributed. Small messages always go over gloo on the CPU, so that they neither wait for
the GPU nor make it wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Talk(Protocol):
    """The connection of all ranks' training threads. All ranks must call each method, in the same order."""

    rank: int
    world_size: int

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's object."""

    def broadcast(self, value: Any, source: int) -> Any:
        """``value`` of rank ``source``, on every rank."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks."""


class DistPeers:
    """A group of all ranks for one kind of message; see :class:`offload.train.worker.batches.Peers`.

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

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's object."""
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, mine, group=self._group)
        return parts

    def broadcast(self, value: Any, source: int) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(x) for x in total.tolist()]
