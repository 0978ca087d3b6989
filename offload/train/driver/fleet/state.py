"""The states of a run's intent, and the orders that follow from one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.adapt.decide import Option
from offload.model.batch_split import BatchSplit
from offload.model.placement import Placement
from offload.train.driver.fleet.nodes import Nodes
from offload.train.driver.fleet.room import Room, Terms
from offload.train.messages import Orders

FIRST_RESTART_S = 15.0  # what a change of the worker count is expected to cost before one was measured


@dataclass(frozen=True, kw_only=True)
class Starting:
    """Before anything runs: the run waits for nodes, or for room that other programs hold.

    Args:
        terms: what the user allows.
        since_s: when it began to wait; None before its first look at the cluster.
    """

    terms: Terms
    since_s: float | None = None


@dataclass(frozen=True)
class Steady:
    """The workers train, or start, as they are wanted."""


@dataclass(frozen=True, kw_only=True)
class MakingRoom:
    """Preprocessing leaves the cores that the next workers take.

    Args:
        next: where these go.
        reshape: the number of the :class:`Reshape` that makes the room.
        split: how they cut global batches; None: as the present ones, carried over.
        decided: whether their number was decided on; otherwise it follows the cluster.
        at_once: whether the present workers commit meanwhile: their nodes are about to leave.
    """

    next: Placement
    reshape: int
    split: BatchSplit | None = None
    decided: bool = False
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Committing:
    """The workers commit and end, and the next group starts.

    Args:
        next: where that goes.
        decided: whether its number was decided on.
        lost: whether the present workers have lost nodes: they end without a commit.
    """

    next: Placement
    decided: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Stranded:
    """No number of workers fits: the run waits for nodes."""


Phase = Steady | MakingRoom | Committing | Stranded


@dataclass(frozen=True, kw_only=True)
class Group:
    """The newest worker group, as the hub knows it: its attempt, its workers (0 before its first step), whether it runs, its nodes, and how
    many groups have failed."""

    attempt: int = 0
    workers: int = 0
    running: bool = False
    nodes: tuple[str, ...] = ()
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the run asked the cluster for: how many bundles, since when, and until when it asks no more because nothing came."""

    bundles: int = 0
    since_s: float | None = None
    refused_until_s: float = -math.inf


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What a change of the worker count costs, in seconds without steps, and the times of the one that is being measured."""

    cost_s: float = FIRST_RESTART_S
    stopped_at: float = 0.0
    resized_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of workers that the driver watches: since when, after which attempt and failures, and whether the user knows."""

    since_s: float
    attempt: int = 0
    failures: int = 0
    told: bool = False


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A run under way.

    Args:
        terms: what the user allows.
        bounds: least and most workers.
        core_cpus: ``num_cpus`` of a preprocessing core.
        now_s: the time of the newest event that has one.
        phase: of a change.
        placement: of the workers that train, or that start next.
        workers_goal: workers for which there should be room.
        cores_goal: cores that should preprocess; None: all that there are.
        nodes: of the cluster.
        used: cores that preprocess, by node id.
        reshapes: how often that changed.
        speeds: how fast each node's cores are, by node id.
        usd_per_core: dollars per hour of a core on a node that only preprocesses, as last known.
        failing: ids of nodes on which workers failed repeatedly.
        process_bytes: the most memory that a preprocessing process was seen to hold.
        group: the newest worker group.
        request: what the run asked the cluster for.
        restart: what a change costs.
        start: the start of workers that is being watched.
        ends_group, without_commit, stop, split, learned, entries_followed, failures_seen: see :class:`Orders`.
        published: the newest orders.
    """

    terms: Terms
    bounds: tuple[int, int]
    core_cpus: float
    now_s: float
    placement: Placement
    workers_goal: int
    nodes: Nodes
    used: Counter[str]
    start: Start
    phase: Phase = field(default_factory=Steady)
    cores_goal: int | None = None
    reshapes: int = 0
    speeds: Mapping[str, float] = field(default_factory=dict)
    usd_per_core: float | None = None
    failing: tuple[str, ...] = ()
    process_bytes: int = 0
    group: Group = field(default_factory=Group)
    request: Request = field(default_factory=Request)
    restart: Restart = field(default_factory=Restart)
    ends_group: int = 0
    without_commit: bool = False
    stop: bool = False
    split: BatchSplit | None = None
    learned: dict[str, Any] | None = None
    entries_followed: int = 0
    failures_seen: int = 0
    published: Orders = field(default_factory=Orders)

    @property
    def busy(self) -> bool:
        """Whether a change is under way, or the run waits for nodes."""
        return not isinstance(self.phase, Steady)

    @property
    def workers(self) -> int:
        """Workers of the next group; 0: none may start at present."""
        if isinstance(self.phase, Stranded) or (isinstance(self.phase, MakingRoom) and self.phase.at_once):
            return 0
        return self.phase.next.workers if isinstance(self.phase, Committing) else self.placement.workers

    @property
    def cores(self) -> int:
        """Cores that preprocess."""
        return self.used.total()

    @property
    def in_use(self) -> frozenset[str]:
        """Ids of the nodes that work for the run."""
        return frozenset(node for node, cores in self.used.items() if cores) | frozenset(self.group.nodes)

    @property
    def refused(self) -> bool:
        """Whether nodes were asked for lately and did not come."""
        return self.now_s < self.request.refused_until_s

    @property
    def room(self) -> Room:
        """Where workers and cores fit now."""
        return Room(
            terms=self.terms,
            bounds=self.bounds,
            nodes=self.nodes,
            core_cpus=self.core_cpus,
            used=self.used,
            speeds=self.speeds,
            usd_per_core=self.usd_per_core,
            grows=self.terms.grows and not self.refused,
            elastic=self.terms.cores is not None and self.cores_goal is not None and not self.refused,
        )

    def next_nodes(self) -> tuple[str, ...]:
        """Ids of the nodes where the workers of the next group go, each as often as it holds one."""
        phase = self.phase
        placement = phase.next if isinstance(phase, MakingRoom | Committing) else self.placement
        return self.room.node_ids(placement.held)

    def fits(self, workers: int) -> bool:
        """Whether this many workers fit now."""
        return self.room.placed(workers) is not None

    def options(self) -> list[Option]:
        """The worker counts to decide between."""
        return self.room.options(self.placement, self.cores_goal, stranded=isinstance(self.phase, Stranded))

    def cores_by_node(self, placement: Placement) -> tuple[int, ...]:
        """How many cores of each usable node preprocess beside these workers."""
        return self.room.cores_by_node(placement, self.cores_goal, self.workers_goal)


State = Starting | Fleet


def orders_of(fleet: Fleet) -> Orders:
    """The orders that follow from a state, with the serial of those before. All orders of a run are made here."""
    return Orders(
        serial=fleet.published.serial,
        workers=fleet.workers,
        avoid=fleet.nodes.without_workers,
        ends_group=fleet.ends_group,
        without_commit=fleet.without_commit,
        stop=fleet.stop,
        split=fleet.split,
        learned=fleet.learned,
        entries_followed=fleet.entries_followed,
        failures_seen=fleet.failures_seen,
    )
