"""The cores on which a feed preprocesses. Pure: nodes in, cores out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.errors import ConfigError, argument
from offload.model.placement import NodeResources, Placement, WorkerResources, place_workers, within_memory
from offload.pipeline.feed.datasets import Cores


@dataclass(frozen=True, kw_only=True)
class NodeChoice:
    """The user's choice of nodes (``"all"``, ``"other_nodes"`` or ``"this_node"``), and the program's own node."""

    choice: str
    home: str

    def allows(self, node_id: str) -> bool:
        """Return whether this node preprocesses."""
        return self.choice == "all" or (node_id == self.home) == (self.choice == "this_node")

    def cores(
        self, nodes: Sequence[NodeResources], runtime_env: Mapping[str, Any], held: Callable[[], str] = str
    ) -> Cores:
        """The cores of these nodes. Raises ConfigError if there is none. ``held`` returns who holds CPUs, in words."""
        allowed = [node for node in within_memory(nodes) if self.allows(node.node_id)]
        if not allowed:
            raise ConfigError(
                f"{argument('placement', self.choice)} leaves no node to preprocess: this cluster has only this one. Let others join, or "
                'pass placement="all".'
            )
        placed = _placed(allowed)
        if placed is None:
            raise ConfigError(
                "no CPU is free to preprocess: all are reserved, by other programs or by other parts of this one"
                f"{f' ({who})' if (who := held()) else ''}. Let them reserve fewer (for example "
                "ScalingConfig(resources_per_worker=...)), or add nodes."
            )
        return Cores(
            nodes=_repeated(allowed, placed),
            task_cpus=placed.task_cpus,
            stores={node.node_id: node.store_bytes for node in allowed},
            runtime_env=runtime_env,
        )

    def follow(
        self, cores: Cores, *, joined: Sequence[NodeResources], gone: set[str], alive: Sequence[NodeResources]
    ) -> Cores:
        """The cores after these nodes have joined, and others are ``gone``."""
        new = [node for node in within_memory(joined) if self.allows(node.node_id)]
        placed = _placed(new)
        nodes = tuple(node for node in cores.nodes if node not in gone)
        nodes += () if placed is None else _repeated(new, placed)
        stores = {node.node_id: node.store_bytes for node in alive if node.node_id in nodes}
        return Cores(nodes=nodes, task_cpus=cores.task_cpus, stores=stores, runtime_env=cores.runtime_env)


def _placed(nodes: Sequence[NodeResources]) -> Placement | None:
    try:
        return place_workers(nodes, WorkerResources(cpus=0.0), (1, 1)) if nodes else None
    except ConfigError:
        return None


def _repeated(nodes: Sequence[NodeResources], placed: Placement) -> tuple[str, ...]:
    """The nodes' ids, each repeated once per core."""
    return tuple(node.node_id for node, cores in zip(nodes, placed.cores_by_node, strict=True) for _ in range(cores))
