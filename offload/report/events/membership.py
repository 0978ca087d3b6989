"""Events of the cluster's nodes: which come and go, what they do, and notices of spot capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.formatting import count
from offload.report.events.event import NodeNames, RunEvent
from offload.report.json_values import text

LONGEST_NAME = 100  # characters of a node's id


@dataclass(frozen=True, kw_only=True)
class ClusterChanged(RunEvent, kind="cluster_changed", group="node", live=True):
    """The nodes that the run may use have changed.

    Args:
        left, leaving, joined: names of nodes.
        joined_nodes: those that joined, each as the fields of ``NodeResources``.
        workers, preprocessing_cores: the size that fits now.
    """

    left: Sequence[str]
    leaving: Sequence[str]
    joined: Sequence[str]
    joined_nodes: Sequence[Mapping[str, Any]] = ()
    workers: int
    preprocessing_cores: int

    def sentence(self, nodes: NodeNames) -> str:
        """The changes by name; empty where only memory has changed, which :class:`ShortOfMemory` reports."""
        changes = {"left": self.left, "leaving": self.leaving, "joined": self.joined}
        parts = [f"{verb} {', '.join(names)}" for verb, names in changes.items() if names]
        if not parts:
            return ""
        cores = self.preprocessing_cores
        return (
            f"the cluster changed ({'; '.join(parts)}): {count(cores, 'core')} preprocess{'es' if cores == 1 else ''}"
        )

    def live_lines(self) -> tuple[str, ...]:
        return tuple(filter(None, super().live_lines()))


@dataclass(frozen=True, kw_only=True)
class NodePreprocesses(RunEvent, kind="node_preprocesses", group="node"):
    """A node has begun to preprocess. ``node``: its id."""

    node: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"node {_named(self.node, nodes)} preprocesses"


@dataclass(frozen=True, kw_only=True)
class TrainingNodes(RunEvent, kind="training_nodes", group="node"):
    """Workers run on the nodes of these ids from now on."""

    nodes: Sequence[str]

    def sentence(self, nodes: NodeNames) -> str:
        names = ", ".join(_named(node, nodes) for node in self.nodes)
        return f"workers train on {names}" if names else "no worker trains"


@dataclass(frozen=True, kw_only=True)
class SpotNoticed(RunEvent, kind="spot_notice", group="node", live=True):
    """The cloud takes a node back at ``deadline_at``, in seconds since 1970. ``source``: the service that says so."""

    node: str
    source: str | None
    action: str
    deadline_at: float

    def sentence(self, nodes: NodeNames) -> str:
        left_s = max(self.deadline_at - self.at, 0.0)
        return f"AWS takes node {self.node} back in {left_s:.0f} s ({self.action}): the run drains it"


@dataclass(frozen=True, kw_only=True)
class SpotRebalance(RunEvent, kind="spot_rebalance", group="node", live=True):
    """The cloud may take a node back soon."""

    node: str
    source: str | None

    def sentence(self, nodes: NodeNames) -> str:
        return f"AWS may take node {self.node} back soon: the run does nothing yet"


@dataclass(frozen=True, kw_only=True)
class SpotUnwatched(RunEvent, kind="spot_unwatched", group="node", live=True):
    """Nobody watches for spot notices of a node."""

    node: str
    source: str | None
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"the run would miss a spot notice for node {self.node} ({self.reason}), and goes on: see offload's page 'On spot nodes'"


@dataclass(frozen=True, kw_only=True)
class RunLeaving(RunEvent, kind="run_leaving", group="node", live=True):
    """Nodes leave with which the whole run ends, such as the head's."""

    nodes: Sequence[str]

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"node {', '.join(self.nodes)} is leaving, and this run cannot go on without it: workers commit a checkpoint, and the same "
            "command resumes the run on another node"
        )


def _named(node_id: Any, nodes: NodeNames) -> str:
    name = nodes.get(node_id) if isinstance(node_id, str) else None
    return text(node_id, LONGEST_NAME) if name is None else name
