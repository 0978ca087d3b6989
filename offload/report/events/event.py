"""What all events of a run have in common: their JSON form, their words, and how a reader gets them from a line.

A line of ``events.jsonl`` begins with ``event`` (the kind) and ``at``. ``rank`` follows if a worker (its number) or the hub (null)
reported the event. The event's own values come last, in the order of the class's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, Self

from offload.report.json_values import text

GroupName = Literal["run", "decision", "node", "fault", "checkpoint", "report", "other"]
GROUPS: Mapping[GroupName, str] = {
    "run": "The run",
    "decision": "Decisions",
    "node": "Nodes",
    "fault": "Faults",
    "checkpoint": "Checkpoints",
    "report": "Reported metrics",
    "other": "Other events",
}
"""The groups of events with their titles, in the order in which the page shows them."""

HUB: Final = "hub"
DRIVER: Final = "driver"
Source = int | Literal["hub", "driver"]
"""Who reports an event: the rank of a worker, ``HUB`` or ``DRIVER``."""
NodeNames = Mapping[str, str]
"""The names of nodes by their ids."""

KINDS: dict[str, type[RunEvent]] = {}
"""The classes of events by their kinds, as files spell them."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run.

    Each kind is a subclass: ``class Resized(RunEvent, kind="resized", group="decision")``. A field without a default is always written.
    A field whose default is None is left out while it is None.

    Values that were read from a file are unchecked: the types say what this version writes. What a line lacks is None.

    Args:
        at: when it was reported, in seconds since 1970; 0 before that.
        by: who reported it.
    """

    KIND: ClassVar[str] = ""
    GROUP: ClassVar[GroupName] = "other"
    LIVE: ClassVar[bool] = False
    """Whether the live line shows the event, too. Otherwise the run only writes it down."""
    CHANGES: ClassVar[bool] = False
    """Whether it changes, or tries to change, what the run does. Charts mark such events."""

    at: float = 0.0
    by: Source = DRIVER

    def __init_subclass__(
        cls, *, kind: str = "", group: GroupName | None = None, live: bool | None = None, changes: bool | None = None
    ) -> None:
        super().__init_subclass__()
        if group is not None:
            cls.GROUP, cls.LIVE = group, False
            cls.CHANGES = group in ("decision", "fault")
        if live is not None:
            cls.LIVE = live
        if changes is not None:
            cls.CHANGES = changes
        if kind:
            cls.KIND = kind
            KINDS[kind] = cls

    @property
    def kind(self) -> str:
        """The kind, as files spell it."""
        return self.KIND

    @property
    def changes(self) -> bool:
        """Whether it changed, or tried to change, what the run does."""
        return self.CHANGES

    def sentence(self, nodes: NodeNames) -> str:
        """The event in words, without capital and full stop. ``nodes``: names for ids.

        It may raise on values of a damaged line: :meth:`words` does not.
        """
        raise NotImplementedError

    def live_lines(self) -> tuple[str, ...]:
        """The event as the live line shows it; empty for one that the run only writes down."""
        return (self.sentence({}),) if self.LIVE else ()

    def words(self, nodes: NodeNames) -> str:
        """The event in words for the page. An event of another version, or a damaged one, shows its kind and its values."""
        try:
            words = self.sentence(nodes) if self._is_complete() else ""
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            words = ""
        return words[:1].upper() + words[1:] if words else self._plain()

    def reported(self, at: float, by: Source) -> Self:
        """The same event, reported at this time by this process."""
        return replace(self, at=at, by=by)

    def values(self) -> dict[str, Any]:
        """The event's own values, as JSON spells them."""
        values = ((field, getattr(self, field.name)) for field in _own_fields(type(self)))
        return {field.name: value for field, value in values if not (value is None and field.default is None)}

    def to_json(self) -> dict[str, Any]:
        """The event as its line in ``events.jsonl``."""
        rank = {} if self.by == DRIVER else {"rank": None if self.by == HUB else self.by}
        return {"event": self.kind, "at": self.at, **rank, **self.values()}

    def _is_complete(self) -> bool:
        """Return whether no value is missing that this version always writes."""
        required = (field.name for field in _own_fields(type(self)) if "None" not in str(field.type))
        return all(getattr(self, name) is not None for name in required)

    def _plain(self) -> str:
        values = ", ".join(f"{name} {text(value, 200)}" for name, value in self.values().items() if value is not None)
        return self.kind.replace("_", " ") + (f": {values}" if values else "")


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(RunEvent):
    """An event of a kind that this version does not know."""

    name: str
    document: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.name

    def sentence(self, nodes: NodeNames) -> str:
        return self._plain()

    def words(self, nodes: NodeNames) -> str:
        return self._plain()

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.document.items() if name not in ("event", "at", "rank")}


def read_event(document: Mapping[str, Any]) -> RunEvent:
    """The event in a line of ``events.jsonl``, which has a text ``event`` and a number ``at``. Never raises on other values."""
    kind, rank = str(document.get("event")), document.get("rank", DRIVER)
    at = document.get("at", 0.0)
    by: Source = HUB if rank is None else rank
    cls = KINDS.get(kind)
    if cls is None:
        return UnknownEvent(at=at, by=by, name=kind, document=document)
    values = {
        field.name: document.get(field.name, None if field.default is MISSING else field.default)
        for field in _own_fields(cls)
    }
    return cls(at=at, by=by, **values)


def _own_fields(cls: type[RunEvent]) -> list[Field[Any]]:
    """The fields of an event's own values."""
    return [field for field in fields(cls) if field.name not in ("at", "by")]
