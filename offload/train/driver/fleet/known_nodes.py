"""Select the cluster's nodes that a run may use: those that are alive, stay, and are reliable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from offload.adapt.failures import FLAPS, Losses
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
from offload.report.events import NodeExcluded, RunEvent, ShortOfMemory


@dataclass(frozen=True, kw_only=True)
class NodesChange:
    """A change of the usable nodes: the names of nodes that left, are about to leave, or joined."""

    left: tuple[str, ...]
    leaving: tuple[str, ...]
    joined: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The criteria for usable nodes.

    Args:
        worker: the resources that each worker reserves.
        most: the most workers.
        mixed: whether workers may train on several kinds of GPU at once.
        gpu_type: the kind of GPU to train on; None: the kind that holds the most workers.
    """

    worker: WorkerResources
    most: int
    mixed: bool = False
    gpu_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class KnownNodes:
    """The cluster's nodes as a run knows them.

    Args:
        selection: the criteria for usable nodes.
        alive: all nodes of the cluster.
        usable: the nodes that the run may use, with GPUs of one kind and room for the processes that fit in their memory.
        gpu_type: the kind of GPU to train on; None: any.
        noticed: ids of nodes under notice. Notices are never taken back.
        failing: ids of nodes on which workers failed repeatedly.
        flapping: addresses of machines that the run lost too often.
        losses: the times at which machines were lost.
        since: the time at which each node was first seen, in seconds.
    """

    selection: Selection
    alive: tuple[NodeResources, ...]
    usable: tuple[NodeResources, ...]
    gpu_type: str | None
    noticed: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    flapping: frozenset[str] = frozenset()
    losses: Losses = field(default_factory=Losses)
    since: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def at_start(
        cls, nodes: Sequence[NodeResources], selection: Selection, now_s: float
    ) -> tuple[KnownNodes, list[RunEvent]]:
        """The nodes at the start of a run, and events about them."""
        gpu_type = _gpu_type(nodes, selection, None)
        usable = within_memory(nodes_for(nodes, gpu_type))
        since = {node.node_id: now_s for node in nodes}
        at_start = cls(selection=selection, alive=tuple(nodes), usable=usable, gpu_type=gpu_type, since=since)
        return at_start, _short_of_memory((), usable, PROCESS_BYTES)

    @property
    def without_workers(self) -> tuple[str, ...]:
        """The ids of the nodes that could hold a worker but should not."""
        usable = {node.node_id: node for node in self.usable}
        return tuple(
            node.node_id
            for node in self.alive
            if node.node_id not in usable or usable[node.node_id].gpus < node.gpus
        )  # fmt: skip

    @property
    def needed_gpu_type(self) -> str | None:
        """The kind of GPU that further worker nodes must have; None if any kind will do."""
        several = self.selection.gpu_type is not None or len(gpu_types(self.alive, self.selection.worker)) > 1
        return self.gpu_type if several and self.gpu_type != UNKNOWN_GPU else None

    def followed(
        self,
        alive: Sequence[NodeResources],
        *,
        leaving: Collection[str],
        failing: Collection[str],
        used: Collection[str],
        enough: Callable[[Sequence[NodeResources]], bool],
        now_s: float,
        process_bytes: float = PROCESS_BYTES,
    ) -> tuple[KnownNodes, NodesChange | None, list[RunEvent]]:
        """Follow the cluster. The change is None if the usable nodes are the same.

        Args:
            alive: the cluster's nodes now.
            leaving: ids of nodes that are alive but will soon be gone.
            failing: ids of nodes on which workers failed repeatedly.
            used: ids of nodes that work for the run.
            enough: whether training can go on with these nodes alone. The last such node is never excluded.
            now_s: the time, in seconds.
            process_bytes: the largest memory measured in a preprocessing process.
        """
        nodes = self._with_losses(alive, used, now_s)
        nodes = dataclasses.replace(nodes, alive=tuple(alive), noticed=nodes.noticed | set(leaving))
        nodes, events = nodes._with_exclusions(failing, enough, now_s)
        staying = [n for n in alive if n.node_id not in nodes.noticed and not nodes._excluded(n)]
        gpu_type = _gpu_type(staying, self.selection, self.gpu_type)
        usable = within_memory(nodes_for(staying, gpu_type), process_bytes)
        # By value: a node whose cores or memory have changed is another node.
        if usable == self.usable:
            return nodes, None, events
        events += _short_of_memory(self.usable, usable, process_bytes)
        before = {node.node_id: node.name for node in self.usable}
        there = {node.node_id for node in alive}
        change = NodesChange(
            left=tuple(name for node_id, name in before.items() if node_id not in there),
            leaving=tuple(node.name for node in alive if node.node_id in nodes.noticed),
            joined=tuple(node.name for node in usable if node.node_id not in before),
        )
        return dataclasses.replace(nodes, gpu_type=gpu_type, usable=usable), change, events

    def _with_losses(self, alive: Sequence[NodeResources], used: Collection[str], now_s: float) -> KnownNodes:
        there = {node.node_id for node in alive}
        # An autoscaler takes idle nodes away, which says nothing about their reliability.
        lost = [node for node in self.alive if node.node_id not in there and node.node_id in used]
        unannounced = [n.name for n in lost if n.node_id not in self.noticed and not self._has_a_sibling(n)]
        since = {node.node_id: self.since.get(node.node_id, now_s) for node in alive}
        return dataclasses.replace(self, losses=self.losses.with_lost(unannounced, now_s), since=since)

    def _has_a_sibling(self, lost: NodeResources) -> bool:
        """Return whether another node was at its address before it. Co-located nodes do not count as flapping machines. A later node may be
        the same machine, restarted before the run noticed its loss."""
        since = self.since.get(lost.node_id, 0.0)
        others = [node for node in self.alive if node.name == lost.name and node.node_id != lost.node_id]
        return any(self.since.get(node.node_id, 0.0) <= since for node in others)

    def _with_exclusions(
        self, failing: Collection[str], enough: Callable[[Sequence[NodeResources]], bool], now_s: float
    ) -> tuple[KnownNodes, list[RunEvent]]:
        flapping = self.losses.flapping(now_s)
        nodes = dataclasses.replace(self, flapping=self.flapping & flapping)  # machines whose losses are old may return
        events: list[RunEvent] = []
        failed = [node for node in nodes.alive if node.node_id in failing and node.node_id not in nodes.failing]
        # All or none of them: there is no reason to prefer one.
        if nodes._can_spare(failed, enough):
            events.append(_excluded_because(failed, "workers failed there repeatedly"))
            nodes = dataclasses.replace(nodes, failing=nodes.failing | {node.node_id for node in failed})
        back = [node for node in nodes.alive if node.name in flapping and node.name not in nodes.flapping]
        if nodes._can_spare(back, enough):
            events.append(_excluded_because(back, f"lost {FLAPS} times within an hour"))
            nodes = dataclasses.replace(nodes, flapping=nodes.flapping | {node.name for node in back})
        return nodes, events

    def _can_spare(self, some: Sequence[NodeResources], enough: Callable[[Sequence[NodeResources]], bool]) -> bool:
        """Return whether ``some`` has nodes, and training can go on without them."""
        ids = {node.node_id for node in some}
        rest = [node for node in self.alive if node.node_id not in ids and not self._excluded(node)]
        return bool(some) and enough(rest)

    def _excluded(self, node: NodeResources) -> bool:
        return node.node_id in self.failing or node.name in self.flapping


def _gpu_type(nodes: Sequence[NodeResources], selection: Selection, before: str | None) -> str | None:
    """The kind of GPU to train on; the previous kind if no node has GPUs now."""
    if selection.mixed:
        return None
    return selection.gpu_type or one_gpu_type(nodes, selection.worker, selection.most, before) or before


def _excluded_because(nodes: Sequence[NodeResources], reason: str) -> RunEvent:
    return NodeExcluded(nodes=[node.name for node in nodes], reason=reason)


def _short_of_memory(
    before: Sequence[NodeResources], now: Sequence[NodeResources], process_bytes: float
) -> list[RunEvent]:
    """Events about nodes whose memory lets fewer cores preprocess than ``before``."""
    room = {node.node_id: node.process_room for node in before}
    short = [node for node in now if node.process_room < room.get(node.node_id, math.inf)]
    if not short:
        return []
    return [
        ShortOfMemory(
            nodes=[node.name for node in short],
            cores=[int(node.process_room) for node in short],
            process_bytes=max(int(process_bytes), PROCESS_BYTES),
        )
    ]
