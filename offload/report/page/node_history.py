"""The nodes of a run over time: when each was there, preprocessed and trained, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from offload.report.events import (
    ClusterChanged,
    FirstStep,
    NodeExcluded,
    NodePreprocesses,
    RunEvent,
    RunStarted,
    SpotNoticed,
    TrainingNodes,
)
from offload.report.json_values import items, number, text
from offload.report.page.clock import RunClock
from offload.report.page.records import Records

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that happened to a node, at a second of the run: ``joined``, ``notice``, ``lost``, ``left`` or ``excluded``."""

    at_s: float
    kind: str


@dataclass(kw_only=True)
class Node:
    """One node. Times are seconds of the run.

    Args:
        name, node_id: the names by which users and the cluster know it.
        cpus, gpus: its resources.
        store_bytes: the size of its object store; None if unknown.
        instance_type, gpu_type: what it is sold as, and the kind of its GPUs; None if unknown.
        spot: whether it is spot capacity.
        there, preprocessing, training: the spans in which it was part of the cluster, preprocessed, and held workers.
        happenings: in their order.
    """

    name: str
    node_id: str
    cpus: float
    gpus: float
    store_bytes: float | None
    instance_type: str | None
    gpu_type: str | None
    spot: bool
    there: list[Span] = field(default_factory=list)
    preprocessing: list[Span] = field(default_factory=list)
    training: list[Span] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The name of its kind, as intervals spell it."""
        return self.instance_type or ("GPU nodes" if self.gpus else "CPU nodes")

    def there_at(self, at_s: float) -> bool:
        """Return whether it was part of the cluster then, both ends included."""
        return any(began <= at_s <= ended for began, ended in self.there)

    def there_up_to(self, at_s: float) -> bool:
        """Return whether it was part of the cluster just before then. The clock stands still between two sessions: a node of the later one
        was not."""
        return any(began < at_s <= ended for began, ended in self.there)


def nodes_of(records: Records, clock: RunClock) -> list[Node]:
    """All nodes in the order in which they came."""
    presence = _Presence()
    for event, at_s in zip(records.events, clock.seconds_of(records.events), strict=True):
        presence.follow(event, at_s)
    presence.close(clock.length_s)
    return list(presence.nodes.values())


class _Presence:
    """The nodes while the events of a run pass by, in their order."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._open: dict[
            tuple[str, str], float
        ] = {}  # begin of each span that has not ended, by node and name of the span
        self._noticed: set[str] = set()
        self._says_training = False

    def follow(self, event: RunEvent, at_s: float) -> None:
        """Take note of what an event says about nodes."""
        match event:
            case RunStarted():
                # The earlier session ended where its last record is: the clock stands still in between.
                self.close(at_s)
                self._join(event.nodes, at_s, happens=False)
            case ClusterChanged():
                self._join(event.joined_nodes, at_s, happens=True)
                self._named(event.leaving, at_s, "notice")
                for node in self._named(event.left, at_s, None):
                    self._happened(node, at_s, "left" if node.node_id in self._noticed else "lost")
                    self._end(node, at_s)
            case NodePreprocesses():
                for node in self._nodes_of([event.node]):
                    self._open.setdefault((node.node_id, "preprocessing"), at_s)
            case TrainingNodes():
                self._says_training = True
                self._train([node.node_id for node in self._nodes_of(event.nodes)], at_s)
            case FirstStep() if not self._says_training:
                # Runs of earlier versions do not name the workers' nodes. They are those with GPUs, or the only node.
                present = [node for node in self.nodes.values() if (node.node_id, "there") in self._open]
                hosts = [node for node in present if node.gpus] or (present if len(present) == 1 else [])
                self._train([node.node_id for node in hosts], at_s)
            case SpotNoticed():
                self._named([event.node], at_s, "notice")
            case NodeExcluded():
                self._named(event.nodes, at_s, "excluded")

    def close(self, at_s: float) -> None:
        """End all spans."""
        for node in self.nodes.values():
            self._end(node, at_s)

    def _join(self, documents: Any, at_s: float, *, happens: bool) -> None:
        for document in items(documents):
            if not isinstance(document, dict):
                continue
            node_id = text(document.get("node_id"), 200) or text(document.get("name"), 200)
            node = self.nodes.setdefault(node_id, _node(document, node_id))
            self._open.setdefault((node.node_id, "there"), at_s)
            if happens:
                self._happened(node, at_s, "joined")

    def _train(self, ids: list[str], at_s: float) -> None:
        for node in self.nodes.values():
            if node.node_id in ids:
                self._open.setdefault((node.node_id, "training"), at_s)
            else:
                self._close(node, "training", at_s)

    def _named(self, names: Any, at_s: float, kind: str | None) -> list[Node]:
        """The nodes of these names, with this note. Users know nodes by names, and a later node may have the name of an earlier one."""
        nodes = []
        for name in items(names):
            node = next((n for n in self.nodes.values() if n.name == name and (n.node_id, "there") in self._open), None)
            if node is None:
                continue
            nodes.append(node)
            if kind is not None:
                if kind == "notice" and node.node_id in self._noticed:
                    continue
                self._happened(node, at_s, kind)
            if kind == "notice":
                self._noticed.add(node.node_id)
        return nodes

    def _nodes_of(self, ids: Any) -> Iterable[Node]:
        """The nodes of these ids; a name serves as well."""
        for node_id in items(ids):
            node = self.nodes.get(node_id) if isinstance(node_id, str) else None
            node = node or next((n for n in self.nodes.values() if n.name == node_id), None)
            if node is not None:
                yield node

    def _happened(self, node: Node, at_s: float, kind: str) -> None:
        node.happenings.append(Happening(at_s=at_s, kind=kind))

    def _end(self, node: Node, at_s: float) -> None:
        for span in ("there", "preprocessing", "training"):
            self._close(node, span, at_s)

    def _close(self, node: Node, span: str, at_s: float) -> None:
        began = self._open.pop((node.node_id, span), None)
        if began is not None:
            getattr(node, span).append((began, max(at_s, began)))


def _node(document: dict[str, Any], node_id: str) -> Node:
    def known(name: str) -> str | None:
        return text(document.get(name), 200) or None

    cpus, gpus = number(document.get("cpus")), number(document.get("gpus"))
    store_bytes = number(document.get("store_bytes"))
    return Node(
        name=text(document.get("name"), 200) or node_id,
        node_id=node_id,
        cpus=max(cpus, 0.0) if cpus == cpus else 0.0,
        gpus=max(gpus, 0.0) if gpus == gpus else 0.0,
        store_bytes=store_bytes if store_bytes > 0 else None,
        instance_type=known("instance_type"),
        gpu_type=known("gpu_type"),
        spot=document.get("spot") is True,
    )
