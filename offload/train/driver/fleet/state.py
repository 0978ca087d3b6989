"""The states of a run, and the orders that follow from a state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.adapt.situation import Option
from offload.arbiter.values import Lease
from offload.model.batch_split import BatchSplit
from offload.model.placement import Placement
from offload.train.driver.fleet.known_nodes import KnownNodes
from offload.train.driver.fleet.room import Room, Terms
from offload.train.messages import Orders

FIRST_RESTART_S = 15.0  # the assumed cost of a change of the worker count before the first measurement


@dataclass(frozen=True, kw_only=True)
class Starting:
    """The state before anything runs: the run waits for nodes, or for room that other programs hold.

    Args:
        terms: the user's terms.
        since_s: the time at which it began to wait; None before its first look at the cluster.
        ours_since_s: the time since which this program alone holds what it waits for; None if others hold some of it.
        lease: what the arbiter lets it begin with; None without an arbiter.
    """

    terms: Terms
    since_s: float | None = None
    ours_since_s: float | None = None
    lease: Lease | None = None


@dataclass(frozen=True)
class Steady:
    """The wanted workers train or start."""


@dataclass(frozen=True, kw_only=True)
class MakingRoom:
    """Preprocessing leaves the cores that the next workers take.

    Args:
        next: the placement of the next workers.
        reshape: the number of the :class:`Reshape` that makes the room.
        split: the next workers' split of global batches; None: the present split, carried over.
        decided: whether a decision chose their number; otherwise it follows the cluster.
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
        next: the placement of the next group.
        decided: whether a decision chose its number of workers.
        lost: whether the present workers have lost nodes: they then end without a commit.
    """

    next: Placement
    decided: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Stranded:
    """No number of workers fits: the run waits for nodes."""


@dataclass(frozen=True, kw_only=True)
class Paused:
    """The run holds nothing, and waits until somebody resumes it.

    Args:
        reshape: the number of the :class:`Reshape` that ends preprocessing; None while workers commit and end.
        released: whether all has ended.
        for_others: whether the arbiter has withdrawn its workers. Once all has ended, the run waits for others: it is stranded.
    """

    reshape: int | None = None
    released: bool = False
    for_others: bool = False


Phase = Steady | MakingRoom | Committing | Stranded | Paused


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """The newest worker group, as the hub knows it: its attempt, its workers (0 before its first step), whether it runs, its nodes, and
    the number of failed groups."""

    attempt: int = 0
    workers: int = 0
    running: bool = False
    nodes: tuple[str, ...] = ()
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """The run's request to the cluster: the number of bundles, its start, and the time until which the run asks no more because nothing
    came."""

    bundles: int = 0
    since_s: float | None = None
    refused_until_s: float = -math.inf


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The cost of a change of the worker count, in seconds without steps, and the times of the change under measurement."""

    cost_s: float = FIRST_RESTART_S
    stopped_at: float = 0.0
    resized_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of workers that the driver watches: its time, the attempt and failures before it, and whether the user knows."""

    since_s: float
    attempt: int = 0
    failures: int = 0
    reported: bool = False


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A run under way.

    Args:
        terms: the user's terms.
        bounds: the least and the most workers.
        core_cpus: ``num_cpus`` of a preprocessing core.
        now_s: the time of the newest event that carries a time.
        phase: the phase of a change.
        placement: the placement of the workers that train, or that start next.
        workers_goal: the number of workers for which there should be room.
        pinned: the number of workers that somebody outside the run has chosen; None: the run's own decisions choose it.
        allotment: the workers by node id, where somebody outside the run has chosen their nodes. It holds while these nodes do.
        lease: what the arbiter lets the run hold, nothing while it is paused; None without an arbiter.
        cores_goal: the number of cores that should preprocess; None: all cores.
        nodes: the nodes of the cluster.
        used: the number of cores that preprocess, by node id.
        reshapes: the number of changes of ``used``.
        speeds: the relative speed of each node's cores, by node id.
        usd_per_core: dollars per hour of a core on a node that only preprocesses, as last known.
        failing: ids of nodes on which workers failed repeatedly.
        silent: ids of nodes that do not answer, although Ray does not count them as dead yet.
        process_bytes: the largest memory measured in a preprocessing process.
        group: the newest worker group.
        request: the request to the cluster.
        restart: the cost of a change.
        start: the start of workers that the driver watches.
        ends_group, without_commit, stop, split, learned, entries_followed, failures_seen: see :class:`Orders`.
        published: the newest orders.
    """

    terms: Terms
    bounds: tuple[int, int]
    core_cpus: float
    now_s: float
    placement: Placement
    workers_goal: int
    nodes: KnownNodes
    used: Counter[str]
    start: Start
    phase: Phase = field(default_factory=Steady)
    pinned: int | None = None
    allotment: Mapping[str, int] = field(default_factory=dict)
    lease: Lease | None = None
    cores_goal: int | None = None
    reshapes: int = 0
    speeds: Mapping[str, float] = field(default_factory=dict)
    usd_per_core: float | None = None
    failing: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    process_bytes: int = 0
    group: GroupState = field(default_factory=GroupState)
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
        """Whether a change is under way, or the run waits for nodes or is paused."""
        return not isinstance(self.phase, Steady)

    @property
    def workers(self) -> int:
        """The number of workers of the next group; 0: none may start at present."""
        if isinstance(self.phase, Stranded | Paused) or (isinstance(self.phase, MakingRoom) and self.phase.at_once):
            return 0
        return self.phase.next.workers if isinstance(self.phase, Committing) else self.placement.workers

    @property
    def homes(self) -> tuple[str, ...]:
        """The id of each worker's node, as far as these workers are those of the allotment; otherwise empty."""
        placement = self.phase.next if isinstance(self.phase, Committing) else self.placement
        homes = self.room.node_ids(placement.held) if self.allotment and self.workers else ()
        return homes if Counter(homes) == Counter(self.allotment) else ()

    @property
    def cores(self) -> int:
        """The number of cores that preprocess."""
        return self.used.total()

    @property
    def in_use(self) -> frozenset[str]:
        """The ids of the nodes that work for the run."""
        return frozenset(node for node, cores in self.used.items() if cores) | frozenset(self.group.nodes)

    @property
    def refused(self) -> bool:
        """Whether the run recently asked for nodes that did not come."""
        return self.now_s < self.request.refused_until_s

    @property
    def room(self) -> Room:
        """The room for workers and cores now."""
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
            lent=None if self.lease is None else self.lease.holding.cores,
        )

    def next_nodes(self) -> tuple[str, ...]:
        """The ids of the nodes for the next group's workers, each repeated once per worker."""
        phase = self.phase
        placement = phase.next if isinstance(phase, MakingRoom | Committing) else self.placement
        return self.room.node_ids(placement.held)

    def fits(self, workers: int) -> bool:
        """Return whether this many workers fit now."""
        return self.room.placed(workers) is not None

    def options(self) -> list[Option]:
        """The worker counts to decide between."""
        return self.room.options(self.placement, stranded=isinstance(self.phase, Stranded), pinned=self.pinned)

    def cores_by_node(self, placement: Placement) -> tuple[int, ...]:
        """The number of cores of each usable node that preprocess beside these workers."""
        return self.room.cores_by_node(placement, self.cores_goal, self.workers_goal)


State = Starting | Fleet


def orders_of(fleet: Fleet) -> Orders:
    """The orders that follow from a state, with the serial of the previous orders. All orders of a run come from here."""
    return Orders(
        serial=fleet.published.serial,
        workers=fleet.workers,
        # Ray still offers silent nodes for placement: it takes longer than the run to count them as dead.
        avoid=(*fleet.nodes.without_workers, *fleet.silent),
        homes=fleet.homes,
        ends_group=fleet.ends_group,
        without_commit=fleet.without_commit,
        stop=fleet.stop,
        split=fleet.split,
        learned=fleet.learned,
        entries_followed=fleet.entries_followed,
        failures_seen=fleet.failures_seen,
    )
