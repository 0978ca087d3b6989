"""The nodes of a run over time: when each was there, preprocessed and trained, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from offload.report.page.clock import STARTS, Clock
from offload.report.page.records import Records, number, text

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
        instance_type, gpu_type: what it is sold as, and the kind of its GPUs; None if unknown.
        spot: whether it is spot capacity.
        there, preprocessing, training: the spans in which it was part of the cluster, preprocessed, and held workers.
        happenings: in their order.
    """

    name: str
    node_id: str
    cpus: float
    gpus: float
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
        """Whether it was part of the cluster then, both ends included."""
        return any(began <= at_s <= ended for began, ended in self.there)

    def there_up_to(self, at_s: float) -> bool:
        """Whether it was part of the cluster just before then. The clock stands still between two sessions: a node of the later one was
        not."""
        return any(began < at_s <= ended for began, ended in self.there)


def nodes_of(records: Records, clock: Clock) -> list[Node]:
    """All nodes in the order in which they came."""
    story = _Story(clock)
    for event, at_s in zip(records.events, clock.seconds_of(records.events), strict=True):
        story.take(event, at_s)
    story.close(clock.length_s)
    return list(story.nodes.values())


class _Story:
    """The events of a run, told once. ``open``: the beginnings of spans that have not ended, by (node, name of the span)."""

    def __init__(self, clock: Clock) -> None:
        self.nodes: dict[str, Node] = {}
        self._open: dict[tuple[str, str], float] = {}
        self._noticed: set[str] = set()
        self._says_training = False
        self._clock = clock

    def take(self, event: dict[str, Any], at_s: float) -> None:
        kind = event["event"]
        if kind in STARTS:
            # The earlier session ended where its last record is: the clock stands still in between.
            self.close(at_s)
            self._join(event.get("nodes"), at_s, told=False)
        elif kind == "cluster_changed":
            self._join(event.get("joined_nodes"), at_s, told=True)
            self._named(event.get("leaving"), at_s, "notice")
            for node in self._named(event.get("left"), at_s, None):
                self._happened(node, at_s, "left" if node.node_id in self._noticed else "lost")
                self._end(node, at_s)
        elif kind == "node_preprocesses":
            for node in self._nodes_of([event.get("node")]):
                self._open.setdefault((node.node_id, "preprocessing"), at_s)
        elif kind == "training_nodes":
            self._says_training = True
            self._train([node.node_id for node in self._nodes_of(event.get("nodes"))], at_s)
        elif kind == "first_step" and not self._says_training:
            # Runs of earlier versions do not say where workers are. GPUs tell, and so does a single node.
            there = [node for node in self.nodes.values() if (node.node_id, "there") in self._open]
            found = [node.node_id for node in there if node.gpus] or [node.node_id for node in there if len(there) == 1]
            self._train(found, at_s)
        elif kind == "spot_notice":
            self._named([event.get("node")], at_s, "notice")
        elif kind == "node_excluded":
            self._named(event.get("nodes"), at_s, "excluded")

    def close(self, at_s: float) -> None:
        """End all spans."""
        for node in self.nodes.values():
            self._end(node, at_s)

    def _join(self, documents: Any, at_s: float, *, told: bool) -> None:
        for document in documents if isinstance(documents, list) else ():
            if not isinstance(document, dict):
                continue
            node_id = text(document.get("node_id"), 200) or text(document.get("name"), 200)
            node = self.nodes.setdefault(node_id, _node(document, node_id))
            self._open.setdefault((node.node_id, "there"), at_s)
            if told:
                self._happened(node, at_s, "joined")

    def _train(self, ids: list[str], at_s: float) -> None:
        for node in self.nodes.values():
            if node.node_id in ids:
                self._open.setdefault((node.node_id, "training"), at_s)
            else:
                self._close(node, "training", at_s)

    def _named(self, names: Any, at_s: float, kind: str | None) -> list[Node]:
        """The nodes of these names, with this note. Users know nodes by names, and a later node may have the name of an earlier one."""
        found = []
        for name in names if isinstance(names, list | tuple) else ():
            alive = [n for n in self.nodes.values() if n.name == name and (n.node_id, "there") in self._open]
            if not alive:
                continue
            found.append(alive[0])
            if kind is not None:
                if kind == "notice" and alive[0].node_id in self._noticed:
                    continue
                self._happened(alive[0], at_s, kind)
            if kind == "notice":
                self._noticed.add(alive[0].node_id)
        return found

    def _nodes_of(self, ids: Any) -> Iterable[Node]:
        """The nodes of these ids; a name serves as well."""
        for each in ids if isinstance(ids, list | tuple) else ():
            node = self.nodes.get(each) if isinstance(each, str) else None
            node = node or next((n for n in self.nodes.values() if n.name == each), None)
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
    return Node(
        name=text(document.get("name"), 200) or node_id,
        node_id=node_id,
        cpus=max(cpus, 0.0) if cpus == cpus else 0.0,
        gpus=max(gpus, 0.0) if gpus == gpus else 0.0,
        instance_type=known("instance_type"),
        gpu_type=known("gpu_type"),
        spot=document.get("spot") is True,
    )
