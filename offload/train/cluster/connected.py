"""What a run knows of the machines that it may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offload.errors import RunError
from offload.model.placement import NodeResources, beside

INSTANCE_TYPE = "instance-type"  # the label with a node's instance type


class ControlLostError(RunError):
    """A process of Ray has ended, and the run cannot go on without it. ``told``: whether the user has read the error already."""

    told = False


@dataclass(frozen=True, kw_only=True)
class ConnectedCluster:
    """The cluster to which this process is connected.

    Args:
        whole: the nodes that are alive, with all their resources.
        ours: whether this process started the cluster.
        held: the resources that other programs hold, by node id.
    """

    whole: tuple[NodeResources, ...]
    ours: bool
    held: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[NodeResources, ...]:
        """The nodes with the resources that are left for this run."""
        return self.left(self.whole)

    def left(self, nodes: Sequence[NodeResources]) -> tuple[NodeResources, ...]:
        """These nodes without the held resources."""
        return tuple(beside(node, self.held.get(node.node_id, {})) for node in nodes)

    def held_of_all(self) -> dict[str, tuple[float, float]]:
        """The amount that others hold, and the total, of each resource of which they hold any."""
        held: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for amounts in self.held.values():
            held.update(amounts)
        for node in self.whole:
            totals.update({"CPU": node.cpus, "GPU": node.gpus, **node.others})
        return {name: (amount, totals[name]) for name, amount in held.items() if amount}
