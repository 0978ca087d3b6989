"""Which of the cluster's nodes a run may use: those that are there, stay, and can be relied on.

Where it stops: what to do on them is decided in :mod:`offload.train.resizing`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from offload.adapt.losses import FLAPS, Losses
from offload.model.placement import (
    PROCESS_BYTES,
    UNKNOWN_GPU,
    NodeResources,
    WorkerResources,
    gpu_types,
    nodes_for,
    one_gpu_type,
    within_memory,
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The cluster has other nodes than before: names of those that left, are about to leave, and joined."""

    left: tuple[str, ...]
    leaving: tuple[str, ...]
    joined: tuple[str, ...]


class Nodes:
    """Of one run.

    Args:
        nodes: of the cluster, at the start.
        worker: what each worker reserves.
        most: workers that there may be.
        mixed: whether workers may train on several kinds of GPU at once.
        asked: the kind of GPU to train on; None: that which holds the most workers.
        tell: writes an event.
        enough: whether training can go on with these nodes alone.
        now: the time, in seconds.
    """

    def __init__(
        self,
        nodes: Sequence[NodeResources],
        worker: WorkerResources,
        most: int,
        *,
        mixed: bool,
        asked: str | None,
        tell: Callable[..., None],
        enough: Callable[[Sequence[NodeResources]], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker, self._most, self._mixed, self._asked = worker, most, mixed, asked
        self._tell, self._enough, self._now = tell, enough, now
        self.gpu_type = self._chosen(nodes, None)
        self.usable = within_memory(nodes_for(nodes, self.gpu_type))
        self._tell_of_memory((), PROCESS_BYTES)
        self._alive = tuple(nodes)
        self._noticed: set[str] = set()  # a notice is not taken back
        self._failing: set[str] = set()
        self._flapping: set[str] = set()
        self._losses = Losses()
        self._since = {node.node_id: now() for node in nodes}  # when each was seen first

    @property
    def without_workers(self) -> tuple[str, ...]:
        """Ids of the nodes that are to hold no worker, though they might."""
        usable = {node.node_id: node for node in self.usable}
        return tuple(
            node.node_id
            for node in self._alive
            if node.node_id not in usable or usable[node.node_id].gpus < node.gpus
        )  # fmt: skip

    @property
    def needed_gpu_type(self) -> str | None:
        """The kind that nodes for workers must have, where any other would be of no use; None where all are one."""
        several = self._asked is not None or len(gpu_types(self._alive, self._worker)) > 1
        return self.gpu_type if several and self.gpu_type != UNKNOWN_GPU else None

    def look(
        self,
        alive: Sequence[NodeResources],
        *,
        leaving: Collection[str],
        failing: Collection[str],
        used: Collection[str],
        process_bytes: float = PROCESS_BYTES,
    ) -> Change | None:
        """Follow the cluster; None where nothing has changed.

        Args:
            alive: its nodes now.
            leaving: ids of nodes that are alive but will soon be gone.
            failing: ids of nodes on which workers failed repeatedly.
            used: ids of nodes that work for the run.
            process_bytes: the most memory that a preprocessing process was seen to hold.
        """
        self._count_losses(alive, used)
        self._alive = tuple(alive)
        self._noticed |= set(leaving)
        self._exclude(alive, failing)
        staying = [node for node in alive if node.node_id not in self._noticed and not self._excluded(node)]
        gpu_type = self._chosen(staying, self.gpu_type)
        usable = within_memory(nodes_for(staying, gpu_type), process_bytes)
        if usable == self.usable:
            return None
        limited, before = self.usable, {node.node_id: node.name for node in self.usable}
        now = {node.node_id: node.name for node in usable}
        self.gpu_type, self.usable = gpu_type, usable
        self._tell_of_memory(limited, process_bytes)
        return Change(
            left=tuple(name for id_, name in before.items() if id_ not in {node.node_id for node in alive}),
            leaving=tuple(node.name for node in alive if node.node_id in self._noticed),
            joined=tuple(name for id_, name in now.items() if id_ not in before),
        )

    def _tell_of_memory(self, before: Sequence[NodeResources], process_bytes: float) -> None:
        """Say which nodes' memory lets fewer of their cores preprocess than ``before``."""
        room = {node.node_id: node.process_room for node in before}
        short = [node for node in self.usable if node.process_room < room.get(node.node_id, math.inf)]
        if short:
            self._tell(
                "short_of_memory",
                nodes=[node.name for node in short],
                cores=[int(node.process_room) for node in short],
                process_bytes=max(int(process_bytes), PROCESS_BYTES),
            )

    def _chosen(self, nodes: Sequence[NodeResources], before: str | None) -> str | None:
        """The kind of GPU to train on; while there is none at all, the one that was trained on before."""
        if self._mixed:
            return None
        return self._asked or one_gpu_type(nodes, self._worker, self._most, before) or before

    def _count_losses(self, alive: Sequence[NodeResources], used: Collection[str]) -> None:
        now_s = self._now()
        there = {node.node_id for node in alive}
        lost = [node for node in self._alive if node.node_id not in there and node.node_id in used]
        self._losses.lost(
            [n.name for n in lost if n.node_id not in self._noticed and not self._has_a_sibling(n)], now_s
        )
        self._since = {node.node_id: self._since.get(node.node_id, now_s) for node in alive}

    def _has_a_sibling(self, lost: NodeResources) -> bool:
        """Whether another node was at its address before it: several nodes at one address are no machine that comes and goes. One
        that came after it may be the same machine, started again before it was found to be lost."""
        since = self._since.get(lost.node_id, 0.0)
        others = [node for node in self._alive if node.name == lost.name and node.node_id != lost.node_id]
        return any(self._since.get(node.node_id, 0.0) <= since for node in others)

    def _exclude(self, alive: Sequence[NodeResources], failing: Collection[str]) -> None:
        flapping = self._losses.flapping(self._now())
        self._flapping &= flapping  # those that were forgotten may come again
        failed = [node for node in alive if node.node_id in failing and node.node_id not in self._failing]
        if self._do_without(failed, "workers failed there repeatedly"):
            self._failing |= {node.node_id for node in failed}
        back = [node for node in alive if node.name in flapping and node.name not in self._flapping]
        if self._do_without(back, f"lost {FLAPS} times within an hour"):
            self._flapping |= {node.name for node in back}

    def _do_without(self, new: Sequence[NodeResources], reason: str) -> bool:
        """Whether to exclude these: not where nothing would be left."""
        ids = {node.node_id for node in new}
        rest = [node for node in self._alive if node.node_id not in ids and not self._excluded(node)]
        if not new or not self._enough(rest):
            return False
        self._tell("node_excluded", nodes=[node.name for node in new], reason=reason)
        return True

    def _excluded(self, node: NodeResources) -> bool:
        return node.node_id in self._failing or node.name in self._flapping
