"""What a run asks of its training processes, and what it hears of them.

A group is one attempt: a number of processes that join, run the same function and end together. It has two implementations, actors on a
Ray cluster (:mod:`offload.train.group.ray_group`) and processes of this machine (:mod:`offload.train.group.local_group`). Nothing here
waits or polls: a group reports every event through a function.

Where it stops: a group decides nothing. :mod:`offload.train.driver.supervisor` starts, ends and replaces groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from offload.train.group.in_worker import Main, Report

Outcome = Literal["finished", "stopped", "replaced"]
"""What a worker's function returns: it trained to its goal, it obeyed the order to stop, or it makes way for another group."""


NODE_ID = "ray.io/node-id"  # a label that every node of Ray has


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What each worker reserves.

    Args:
        bundle: the amounts of resources by name, as Ray names them.
        strategy: Ray's placement strategy.
        labels: the label selector that its node must meet.
        runtime_env: the runtime environment.
    """

    bundle: Mapping[str, float]
    strategy: str = "PACK"
    labels: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def selectors(self, plan: Plan) -> list[dict[str, str]]:
        """The label selector of each worker's node: its home, or any node but those to avoid. Empty if any node will do."""
        if plan.homes:
            return [{**self.labels, NODE_ID: home} for home in plan.homes]
        selector = {**self.labels, **({NODE_ID: f"!in({','.join(plan.avoid)})"} if plan.avoid else {})}
        return [selector] * plan.workers if selector else []


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order to start a group.

    Args:
        attempt: the number of the group within the run, from 1.
        workers: the number of processes.
        avoid: the ids of nodes on which none may run.
        homes: the id of each process's node; empty: any node but those to avoid.
    """

    attempt: int
    workers: int
    avoid: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Joining:
    """All processes of a group run, and their function begins. ``nodes``: the id of each rank's node."""

    attempt: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NotStarted:
    """A group could not start, for this reason."""

    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The function of a rank has returned or raised."""

    attempt: int
    rank: int
    report: Report


@dataclass(frozen=True, kw_only=True)
class Died:
    """The process of a rank has ended before its function did.

    Args:
        reason: what is known of the cause at once. :meth:`Group.how_ended` may know more.
    """

    attempt: int
    rank: int
    reason: str


GroupEvent = Joining | NotStarted | Ended | Died


class Group(Protocol):
    """The processes of one attempt."""

    def how_ended(self, rank: int) -> str | None:
        """How the process of this rank ended, as a sentence without a full stop; None if nothing is known. It may take some seconds."""

    def end(self) -> None:
        """End all processes at once and give back what they hold. Further events of this group mean nothing. It may be called again."""


class Groups(Protocol):
    """Starts the groups of a run."""

    def start(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None]) -> Group:
        """Begin to start a group whose processes call ``main``; return at once. ``tell`` hears its events, from any thread."""
