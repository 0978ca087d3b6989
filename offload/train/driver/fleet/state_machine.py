"""The transitions of the state machine, ``step(state, event) -> (state, actions)``.

A change of the workers has four parts, none of which waits: preprocessing leaves the cores that the next workers take
(:class:`MakingRoom`), the workers commit and end, the next group starts (:class:`Committing`), and preprocessing takes the
remaining cores (:class:`Steady`). Nodes that leave or join meanwhile redirect the change; they never begin a second one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from offload.arbiter.values import Lease, same
from offload.errors import ConfigError
from offload.model.allocation.values import Holding
from offload.model.batch_split import BatchSplit
from offload.model.placement import Bundle, Placement, placed_as
from offload.report.events.decisions import (
    CoreCountWanted,
    Leased,
    NodesNotGranted,
    ReadyToResize,
    ResizeCost,
    Resized,
    WorkerCountWanted,
)
from offload.report.events.event import RunEvent
from offload.report.events.membership import ClusterChanged
from offload.report.events.training import CheckpointWritten, FirstStep, PauseEnded, RunPaused
from offload.train.driver.fleet.known_nodes import KnownNodes, NodesChange
from offload.train.driver.fleet.messages import (
    Action,
    Ask,
    ClusterSeen,
    CoresWanted,
    EntriesFollowed,
    Event,
    Ignored,
    Learned,
    LeaseSeen,
    NewsRead,
    PauseAsked,
    Publish,
    Reshape,
    ResizeDecided,
    ResumeAsked,
    RoomMade,
    Show,
    SplitDecided,
    StopAsked,
    TellNotStarted,
    WorkersEnded,
    WorkersWanted,
)
from offload.train.driver.fleet.room import Terms, missing_at_start, start_on, task_cpus, usd_per_core
from offload.train.driver.fleet.state import (
    Committing,
    Fleet,
    GroupState,
    MakingRoom,
    Paused,
    Phase,
    Request,
    Start,
    Starting,
    State,
    Steady,
    Stranded,
    orders_of,
)
from offload.train.messages import TRAIN, News

ROOM_TIMEOUT_S = 60.0  # time for the tasks on cores that workers take
GRANT_S = 900.0  # time for nodes to join after the run asked for them
REFUSED_S = 1800.0  # time without new requests after nodes did not come
OWN_ROOM_S = 60.0  # time to wait for what the program itself holds, which waits for the run in turn
OVERDUE_S = 60.0  # time after which the run reports that no worker has started


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state after an event, and the actions to carry out.

    Raises ConfigError if the run can never start: the cluster does not suffice and cannot grow.
    """
    if isinstance(state, Starting):
        return _start(state, event)
    turn = _Turn(state)
    turn.take(event)
    return turn.end()


# -- the start ---------------------------------------------------------------------------------------------------------


def _start(state: Starting, event: Event) -> tuple[State, tuple[Action, ...]]:
    if isinstance(event, LeaseSeen):
        return dataclasses.replace(state, lease=event.lease), ()
    if not isinstance(event, ClusterSeen):
        return state, (Ignored(event=event, reason="the run has not started"),)
    if state.lease is not None:
        return _start_leased(state, state.lease, event)
    terms = state.terms
    since_s = event.now_s if state.since_s is None else state.since_s
    who = "this program itself holds" if event.by_us else "other programs hold"
    try:
        placement = start_on(event.nodes, terms, terms.first)
    except ConfigError as error:
        if terms.least_allowed is None:
            raise
        if terms.grows:
            missing = missing_at_start(event.nodes, terms)
            if not missing:  # missing nodes are not the problem
                raise
            if event.now_s - since_s > terms.nodes_deadline_s:
                raise ConfigError(
                    f"the requested nodes did not come within {terms.nodes_deadline_s:.0f} s (nodes_deadline_s): {error} "
                    "ray status shows the autoscaler's state: a quota may be exhausted, or the cluster at its maximum size."
                ) from None
            parts = ", ".join(f"{count} × {_in_words(bundle)}" for bundle, count in missing.items())
            beside = f"; {who} {event.held}" if event.held else ""
            shown = Show(text=f"waiting for nodes with room for {parts}{beside}")
            return dataclasses.replace(state, since_s=since_s), (Ask(missing=missing, hold=True), shown)
        # Nobody holds anything, and the cluster does not grow: waiting cannot help.
        if not event.held:
            raise
        start_on(event.whole, terms, terms.first)  # raises if even the whole cluster would not suffice
        shown = Show(text=f"waiting for room: {who} {event.held}")
        if not event.by_us:
            return dataclasses.replace(state, since_s=since_s, ours_since_s=None), (shown,)
        # What this program holds is free only once it ends something, and it now waits in fit(). So that wait has a
        # limit, while other programs end by themselves.
        ours_since_s = event.now_s if state.ours_since_s is None else state.ours_since_s
        if event.now_s - ours_since_s > OWN_ROOM_S:
            raise ConfigError(
                f"the run has waited {event.now_s - ours_since_s:.0f} s for CPUs that this program itself holds, {event.held}. End these "
                "actors (ray.kill) and the iterations over DataLoaders before fit(), or give Ray more CPUs."
            ) from None
        return dataclasses.replace(state, since_s=since_s, ours_since_s=ours_since_s), (shown,)
    nodes, events = KnownNodes.at_start(event.nodes, terms.selection, event.now_s)
    # Without a range, the run keeps the workers that fit at the start, and has fewer only after it lost nodes.
    bounds = terms.bounds if terms.chosen else (1, placement.workers)
    return _begun(event, terms, nodes, placement, bounds=bounds, events=events)


def _start_leased(state: Starting, lease: Lease, event: ClusterSeen) -> tuple[State, tuple[Action, ...]]:
    """Begin with exactly the workers and cores of a lease."""
    terms, holding = state.terms, lease.holding
    if not holding.worker_count:
        return state, (Show(text=f"waiting for the arbiter: {lease.reason}"),)
    nodes, events = KnownNodes.at_start(event.nodes, terms.selection, event.now_s)
    placement = placed_as(nodes.usable, terms.worker, [holding.workers.get(n.node_id, 0) for n in nodes.usable])
    if placement is None or placement.workers != holding.worker_count:
        return state, (Show(text="waiting for the arbiter: the nodes that it chose have changed"),)
    return _begun(event, terms, nodes, placement, bounds=terms.bounds, events=events, lease=lease)


def _begun(
    event: ClusterSeen,
    terms: Terms,
    nodes: KnownNodes,
    placement: Placement,
    *,
    bounds: tuple[int, int],
    events: Sequence[RunEvent],
    lease: Lease | None = None,
) -> tuple[State, tuple[Action, ...]]:
    """The first state of a run under way."""
    cores = placement.cores_by_node
    if lease is not None:
        cores = tuple(min(n, lease.holding.cores.get(at.node_id, 0)) for n, at in zip(cores, nodes.usable, strict=True))
    fleet = Fleet(
        terms=terms,
        bounds=bounds,
        # A leased core is a CPU.
        core_cpus=task_cpus(nodes.usable, terms.worker, bounds) if lease is None else 1.0,
        now_s=event.now_s,
        placement=placement,
        workers_goal=placement.workers,
        nodes=nodes,
        used=Counter({n.node_id: count for n, count in zip(nodes.usable, cores, strict=True) if count}),
        start=Start(since_s=event.now_s),
        usd_per_core=usd_per_core(nodes, terms),
        lease=lease,
        pinned=None if lease is None else placement.workers,
        allotment={} if lease is None else lease.holding.workers,
    )
    turn = _Turn(fleet)
    turn.do(Ask(missing={}), *events)
    return turn.end()


def _in_words(bundle: Bundle) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in bundle)


def leased_event(lease: Lease) -> Leased:
    """What the user hears of a lease."""
    return Leased(workers=lease.holding.worker_count, cores=lease.holding.core_count, reason=lease.reason)


def _emptied(lease: Lease | None) -> Lease | None:
    """A lease that allows nothing; None without an arbiter."""
    if lease is None:
        return None
    nothing = dataclasses.replace(lease.allotment, holding=Holding(), reason="resumed just now")
    return dataclasses.replace(lease, holding=Holding(), allotment=nothing)


# -- a run under way ---------------------------------------------------------------------------------------------------


class _Turn:
    """The processing of one event: the state so far, and the actions."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._actions: list[Action] = []

    def end(self) -> tuple[Fleet, tuple[Action, ...]]:
        """Return the state and the actions, with a Publish action if the orders that follow from the state have changed."""
        # Compared here, once per event, so that no transition can forget to publish what it changed.
        orders = orders_of(self.fleet)
        if orders != self.fleet.published:
            orders = dataclasses.replace(orders, serial=orders.serial + 1)
            self._set(published=orders)
            self.do(Publish(orders=orders))
        return self.fleet, tuple(self._actions)

    def do(self, *actions: Action) -> None:
        self._actions += actions

    def _set(self, **changes: Any) -> None:
        self.fleet = dataclasses.replace(self.fleet, **changes)

    def take(self, event: Event) -> None:
        """Process an event."""
        match event:
            case NewsRead():
                self._read(event)
            case ClusterSeen():
                self._look(event)
            case RoomMade():
                self._room_made(event)
            case ResizeDecided():
                self._resize(event)
            case SplitDecided():
                self._set(split=event.split)
            case WorkersWanted():
                self._want_workers(event)
            case CoresWanted():
                self._want_cores(event)
            case Learned():
                self._set(learned=event.state)
            case EntriesFollowed():
                # Never lower: a restart repeats some progress, and must not withdraw what workers already know.
                self._set(entries_followed=max(self.fleet.entries_followed, event.entries))
            case StopAsked():
                self._set(stop=True)
            case PauseAsked():
                self._pause(event)
            case WorkersEnded():
                self._workers_ended(event)
            case ResumeAsked():
                self._resume(event)
            case LeaseSeen():
                self._note_lease(event.lease)
            case _ as never:
                assert_never(never)

    # -- decisions -------------------------------------------------------------------------------------------------

    def _resize(self, event: ResizeDecided) -> None:
        if self.fleet.busy:
            self.do(Ignored(event=event, reason="another change is under way"))
        elif self.fleet.stop:
            self.do(Ignored(event=event, reason="the run is ending"))
        elif not self.fleet.room.may_be(event.split.workers):
            self.do(Ignored(event=event, reason=f"{event.split.workers} workers are outside the user's limits"))
        elif (placement := self._place(event)) is None:
            self.do(Ignored(event=event, reason=f"there is no room for {event.split.workers} workers now"))
        else:
            if event.pinned:
                self._set(pinned=event.split.workers)
            self._set(allotment=event.allotment)
            self._make_room(placement, split=event.split, decided=True)

    def _place(self, event: ResizeDecided) -> Placement | None:
        """The placement of the workers of a decision, on the nodes that it names, if any; None if they do not fit."""
        room = self.fleet.room
        if not event.allotment:
            return room.placed(event.split.workers)
        return self._placed_by_node(event.allotment) if sum(event.allotment.values()) == event.split.workers else None

    def _want_workers(self, event: WorkersWanted) -> None:
        fleet = self.fleet
        # Where no decision chooses the number, the goal stays what fitted at the start: lost workers come back with their nodes.
        if event.workers == fleet.workers_goal or not fleet.terms.chosen:
            return
        if event.workers > fleet.placement.workers:
            self.do(WorkerCountWanted(workers=event.workers, before=fleet.placement.workers))
        self._set(workers_goal=event.workers)

    def _want_cores(self, event: CoresWanted) -> None:
        if event.cores == self.fleet.cores_goal:
            return
        self.do(
            CoreCountWanted(
                cores=event.cores,
                before=self.fleet.cores,
                device_samples_per_s=event.device_samples_per_s,
                core_samples_per_s=event.core_samples_per_s,
                capped_samples_per_s=event.capped_samples_per_s,
            )
        )
        self._set(cores_goal=event.cores)
        if not self.fleet.busy:  # otherwise the end of the change does it
            self._reshape(self.fleet.placement)

    # -- a pause -----------------------------------------------------------------------------------------------------

    def _pause(self, event: PauseAsked) -> None:
        fleet = self.fleet
        if fleet.stop or isinstance(fleet.phase, Paused):
            self.do(Ignored(event=event, reason="the run is ending" if fleet.stop else "the run is paused"))
            return
        self._begin_pause()

    def _begin_pause(self, *, for_others: bool = False) -> None:
        # A change that is under way ends with this group, too: what follows it is decided anew after the pause.
        self._set(phase=Paused(for_others=for_others), ends_group=self.fleet.group.attempt)
        self.do(Ask(missing={}))

    def _workers_ended(self, event: WorkersEnded) -> None:
        """End preprocessing: the workers have committed, and need no more data."""
        fleet = self.fleet
        phase = fleet.phase
        if not isinstance(phase, Paused) or phase.reshape is not None or event.serial != fleet.published.serial:
            return
        self._release_cores(ROOM_TIMEOUT_S)
        self._set(phase=dataclasses.replace(phase, reshape=self.fleet.reshapes))

    def _release_cores(self, timeout_s: float = 0.0) -> None:
        """End preprocessing. Above 0, :class:`RoomMade` follows."""
        number = self.fleet.reshapes + 1
        self._set(used=Counter(), reshapes=number)
        self.do(Reshape(number=number, nodes=(), stores=self.fleet.room.stores(), timeout_s=timeout_s))

    def _resume(self, event: ResumeAsked) -> None:
        fleet = self.fleet
        if fleet.stop or not (isinstance(fleet.phase, Paused) and fleet.phase.released):
            self.do(Ignored(event=event, reason="the run is ending" if fleet.stop else "the run is not paused"))
            return
        self.do(PauseEnded())
        self._set(phase=Stranded(), ends_group=fleet.group.attempt, without_commit=False)
        self._leave_strand()

    # -- a lease -----------------------------------------------------------------------------------------------------

    def _note_lease(self, lease: Lease) -> None:
        """Note what the arbiter lets the run hold. What it withdraws from preprocessing ends now, and the next look at the cluster, which
        shows the room of this lease, does the rest."""
        before, phase = self.fleet.lease, self.fleet.phase
        self._set(lease=lease)
        if before is None or not same(before.holding, lease.holding):
            self.do(leased_event(lease))
        if isinstance(phase, Steady):
            nodes = self.fleet.room.node_ids(self.fleet.cores_by_node(self.fleet.placement))
            if Counter(nodes) != self.fleet.used:
                self._reshape(self.fleet.placement)

    def _follow_lease(self, lease: Lease) -> None:
        """Change the workers to those of a lease."""
        fleet, holding = self.fleet, lease.holding
        stranded = isinstance(fleet.phase, Stranded)
        if fleet.stop:
            return
        if not holding.worker_count:
            # Whatever change is under way, its workers would start without a core that preprocesses for them.
            if not isinstance(fleet.phase, Stranded | Paused):
                self._begin_pause(for_others=True)
            elif stranded and fleet.used:  # its workers were lost, and others need its cores
                self._release_cores()
            return
        placement = self._placed_by_node(holding.workers)
        if placement is None or (fleet.busy and not stranded):
            return  # one of its nodes has just left, or a change is under way
        if stranded:
            self._set(pinned=placement.workers, allotment=holding.workers)
            self._take_up(placement)
        elif placement.held != fleet.placement.held and fleet.group.running and fleet.group.workers:
            self._set(pinned=placement.workers, allotment=holding.workers)
            self._make_room(placement, decided=True)

    def _placed_by_node(self, workers: Mapping[str, int]) -> Placement | None:
        """The placement of these workers by node id; None if they do not fit there."""
        room = self.fleet.room
        placement = room.placed_as([workers.get(node.node_id, 0) for node in room.nodes.usable])
        return placement if placement is not None and placement.workers == sum(workers.values()) else None

    def _leave_strand(self) -> None:
        """Go on if workers fit again."""
        fleet = self.fleet
        if fleet.lease is not None:
            self._follow_lease(fleet.lease)
            return
        wanted = max(fleet.workers_goal, fleet.placement.workers) if fleet.pinned is None else fleet.pinned
        if (placement := fleet.room.most(wanted)) is not None:
            self._take_up(placement)

    # -- news of the workers ---------------------------------------------------------------------------------------

    def _read(self, event: NewsRead) -> None:
        news = event.news
        for reported in news.events:
            self._measure_restart(reported)
        group = GroupState(
            attempt=news.attempts,
            workers=news.group.workers,
            running=news.running,
            nodes=news.worker_nodes,
            failures=news.failures,
        )
        self._set(
            now_s=event.now_s,
            group=group,
            speeds=news.speeds.get(TRAIN, {}),
            failing=news.failing,
            process_bytes=news.process_bytes,
        )
        if isinstance(self.fleet.phase, Committing):
            self._finish(self.fleet.phase)
        if isinstance(self.fleet.phase, Paused) and self.fleet.ends_group < group.attempt:
            self._set(ends_group=group.attempt)  # it began just before the orders to pause reached the hub
        self._watch_start(news)

    def _finish(self, phase: Committing) -> None:
        """End the change once a group with the wanted number of workers trains."""
        fleet = self.fleet
        # The old group still ends, or the new one has made no step yet.
        if fleet.group.attempt <= fleet.ends_group or not fleet.group.workers:
            return
        elsewhere = fleet.homes and set(fleet.homes) != set(fleet.group.nodes)
        if fleet.group.workers != phase.next.workers or elsewhere:
            # This group started just before the orders reached the hub, for example after a failure.
            self._set(ends_group=fleet.group.attempt)
            return
        before = fleet.placement.workers
        # After a loss, the goal stays, so that workers come back with their nodes.
        goal = phase.next.workers if phase.decided else fleet.workers_goal
        self._set(phase=Steady(), placement=phase.next, workers_goal=goal, without_commit=False)
        self._reshape(phase.next)
        # After a loss, events have already said what happened: nobody decided to resize.
        if not phase.lost:
            self.do(Resized(workers_before=before, workers=phase.next.workers))
        self._grow_back()

    def _measure_restart(self, event: RunEvent) -> None:
        """Learn the cost of a change from the workers' events: from the last commit to the next group's first step."""
        restart = self.fleet.restart
        if isinstance(event, CheckpointWritten):
            # Training stopped when the checkpoint began, not when it was written.
            restart = dataclasses.replace(restart, stopped_at=event.at - event.seconds)
        elif isinstance(event, ReadyToResize):
            # Workers that have trained nothing do not commit, so the cost of this change is unknown.
            restart = dataclasses.replace(restart, resized_at=restart.stopped_at or None)
        elif isinstance(event, FirstStep) and restart.resized_at is not None:
            without_steps_s = event.at - restart.resized_at
            restart = dataclasses.replace(restart, resized_at=None)
            if without_steps_s > 0:  # otherwise, a clock was set back, or rank 0 moved to a host whose clock is behind
                restart = dataclasses.replace(restart, cost_s=without_steps_s)
                self.do(ResizeCost(without_steps_s=round(without_steps_s, 3)))
        self._set(restart=restart)

    def _watch_start(self, news: News) -> None:
        """Tell the user once if workers take long to start: another program may have taken their room."""
        fleet, start = self.fleet, self.fleet.start
        # After a failure, the time of the next group counts.
        if news.failures > start.failures:
            start = Start(since_s=fleet.now_s, attempt=news.attempts, failures=news.failures)
        # None may start at present, so none is late.
        if not fleet.workers:
            start = dataclasses.replace(start, since_s=fleet.now_s)
        started = news.running or news.attempts > start.attempt
        if not (start.reported or started) and fleet.now_s - start.since_s >= OVERDUE_S:
            start = dataclasses.replace(start, reported=True)
            worker = fleet.terms.worker
            needs = {"CPU": worker.cpus, "GPU": worker.gpus, **worker.others}
            self.do(
                TellNotStarted(
                    workers=fleet.workers,
                    after_s=fleet.now_s - start.since_s,
                    needs={name: amount for name, amount in needs.items() if amount},
                )
            )
        self._set(start=start)

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _look(self, event: ClusterSeen) -> None:
        fleet = self.fleet
        nodes, change, events = fleet.nodes.followed(
            event.nodes,
            leaving=event.leaving,
            failing=fleet.failing,
            used=fleet.in_use,
            enough=fleet.room.enough,
            now_s=event.now_s,
            process_bytes=fleet.process_bytes,
        )
        self.do(*events)
        self._set(now_s=event.now_s, nodes=nodes, silent=event.silent, failures_seen=fleet.group.failures)
        if isinstance(self.fleet.phase, Paused):
            self._ask()
            return
        if fleet.lease is not None:
            waits = isinstance(fleet.phase, Stranded) or not fleet.lease.holding.worker_count
            if change is not None and not waits:
                self._follow(change, Counter(fleet.room.node_ids(fleet.placement.held)))
            self._follow_lease(fleet.lease)
        elif change is not None:
            self._follow(change, Counter())
        elif isinstance(self.fleet.phase, Stranded):
            self._leave_strand()
        # The nodes of the workers are under notice, although the same number of workers fits without them: they must
        # move.
        if not self.fleet.busy and not event.leaving.isdisjoint(self.fleet.group.nodes):
            self._make_room(self.fleet.placement, at_once=True)
        self._ask()  # last: requests pause during a change

    def _follow(self, change: NodesChange, workers: Mapping[str, int]) -> None:
        """Follow a change of the usable nodes. ``workers``: those of a leased run, by node id."""
        usd = usd_per_core(self.fleet.nodes, self.fleet.terms)
        self._set(usd_per_core=self.fleet.usd_per_core if usd is None else usd)
        # New nodes show that the cluster grants something, so an earlier refusal no longer counts.
        if change.joined:
            self._set(request=dataclasses.replace(self.fleet.request, since_s=None, refused_until_s=-math.inf))
        fleet = self.fleet
        phase = fleet.phase
        going_on = fleet.room.placed(phase.next.workers) if isinstance(phase, MakingRoom | Committing) else None
        # Where only amounts have changed, as when another program ends, the workers stay on their nodes.
        same_nodes = not (change.left or change.leaving or change.joined) and isinstance(phase, Steady)
        staying = fleet.room.placed_as(fleet.placement.held) if same_nodes else None
        if fleet.lease is not None:
            going_on, staying = self._leased_places(fleet.lease, workers)
        placement = going_on or staying or fleet.room.most(fleet.placement.workers)
        self.do(
            ClusterChanged(
                left=change.left,
                leaving=change.leaving,
                joined=change.joined,
                joined_nodes=[dataclasses.asdict(n) for n in fleet.nodes.usable if n.name in change.joined],
                workers=placement.workers if placement is not None else 0,
                preprocessing_cores=sum(fleet.cores_by_node(placement)) if placement is not None else 0,
            )
        )
        if placement is None:
            self._strand(leaving=bool(change.leaving))
        elif isinstance(phase, Committing):
            self._set(
                phase=dataclasses.replace(phase, next=placement)
            )  # its end gives preprocessing the remaining cores
        elif isinstance(phase, MakingRoom) and going_on is not None:
            # The change under way still fits: another node is no reason to start over.
            self._make_room(going_on, split=phase.split, decided=phase.decided, at_once=phase.at_once)
        elif change.leaving and placement.workers < fleet.placement.workers:
            self._make_room(placement, at_once=True)
        else:
            self._take_up(placement)

    def _leased_places(self, lease: Lease, workers: Mapping[str, int]) -> tuple[Placement | None, Placement | None]:
        """Where the workers of a leased run go on with a change under way, and where they stay or go otherwise."""
        leased, phase = self._placed_by_node(lease.holding.workers), self.fleet.phase
        if isinstance(phase, MakingRoom | Committing):
            if leased is not None:
                self._set(pinned=leased.workers, allotment=lease.holding.workers)
            return leased, None
        return None, self._placed_by_node(workers) or leased

    def _strand(self, *, leaving: bool) -> None:
        """Wait for nodes: no number of workers fits. Workers whose nodes are about to leave commit within the notice."""
        self._set(phase=Stranded(), ends_group=self.fleet.group.attempt if leaving else self.fleet.ends_group)

    def _take_up(self, placement: Placement) -> None:
        """Go on with the workers that still fit, or begin to change back to their earlier number."""
        fleet = self.fleet
        ended = isinstance(fleet.phase, Stranded | MakingRoom) and fleet.ends_group >= fleet.group.attempt > 0
        fewer = placement.workers < fleet.placement.workers
        if ended or fewer:
            # After a loss of nodes, workers may hold the cores of preprocessing and wait for data: they cannot commit first.
            self._set(
                phase=Committing(next=placement, lost=True),
                ends_group=fleet.group.attempt,
                without_commit=not ended,
            )
            self._reshape(placement)
            return
        self._set(phase=Steady(), placement=placement)
        self._reshape(placement)
        self._grow_back()

    def _grow_back(self) -> None:
        """Begin to return to the earlier number of workers if lost nodes have come back and no decision chooses the number."""
        fleet = self.fleet
        more = None if fleet.terms.chosen or fleet.stop else fleet.room.most(fleet.workers_goal)
        if more is not None and more.workers > fleet.placement.workers:
            self._make_room(more)

    def _make_room(
        self, placement: Placement, *, split: BatchSplit | None = None, decided: bool = False, at_once: bool = False
    ) -> None:
        """Withdraw preprocessing from the cores that workers will take, and from nodes that will leave."""
        fleet = self.fleet
        number = fleet.reshapes + 1
        # The intersection: preprocessing takes new cores only after the change, since the present workers may still hold them.
        keep = Counter(fleet.room.node_ids(fleet.cores_by_node(placement))) & fleet.used
        self._set(
            phase=MakingRoom(next=placement, reshape=number, split=split, decided=decided, at_once=at_once),
            used=keep,
            reshapes=number,
            ends_group=fleet.group.attempt if at_once else fleet.ends_group,
            without_commit=False,
        )
        nodes = tuple(keep.elements())
        self.do(Reshape(number=number, nodes=nodes, stores=fleet.room.stores(), timeout_s=ROOM_TIMEOUT_S))

    def _room_made(self, event: RoomMade) -> None:
        phase = self.fleet.phase
        if isinstance(phase, Paused) and phase.reshape == event.number:
            if phase.for_others:
                self._set(phase=Stranded(), ends_group=self.fleet.group.attempt, without_commit=False)
                return
            # Others may get what it held: it goes on with the arbiter's next lease.
            self._set(phase=dataclasses.replace(phase, released=True), lease=_emptied(self.fleet.lease))
            self.do(RunPaused())
            return
        if not isinstance(phase, MakingRoom) or phase.reshape != event.number:
            self.do(Ignored(event=event, reason="the change that needed the room was abandoned"))
            return
        self._set(
            phase=Committing(next=phase.next, decided=phase.decided),
            ends_group=self.fleet.group.attempt,
            without_commit=False,
            split=phase.split or self.fleet.split,
        )

    def _reshape(self, placement: Placement) -> None:
        """Preprocess on all wanted cores beside these workers."""
        nodes = self.fleet.room.node_ids(self.fleet.cores_by_node(placement))
        number = self.fleet.reshapes + 1
        self._set(used=Counter(nodes), reshapes=number)
        self.do(Reshape(number=number, nodes=nodes, stores=self.fleet.room.stores()))

    # -- requests to the cluster -----------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask for missing nodes. Requests pause while workers start: a request holds new room for a moment, and the workers could need
        that room."""
        fleet = self.fleet
        stranded = isinstance(fleet.phase, Stranded)
        if not stranded and (fleet.busy or not fleet.group.running):
            self.do(Ask(missing={}))
            return
        missing = fleet.room.missing(None if stranded else fleet.placement, fleet.cores_goal, fleet.workers_goal)
        bundles, request = sum(missing.values()), fleet.request
        # A larger request is a new one, and gets its full time. A smaller one goes on: a part of it has come.
        since_s = request.since_s if missing and bundles <= request.bundles else None
        refused_until_s = request.refused_until_s
        if fleet.refused and not stranded:
            missing = {}
        elif missing and since_s is None:
            since_s = fleet.now_s
        elif since_s is not None and fleet.now_s - since_s >= GRANT_S:
            # A stranded run cannot go on without nodes, so it keeps asking.
            since_s = None
            self._tell_not_granted(stranded=stranded)
            refused_until_s = refused_until_s if stranded else fleet.now_s + REFUSED_S
        self._set(request=Request(bundles=bundles, since_s=since_s, refused_until_s=refused_until_s))
        self.do(Ask(missing=missing, hold=stranded))

    def _tell_not_granted(self, *, stranded: bool) -> None:
        fleet = self.fleet
        self.do(
            NodesNotGranted(
                workers=fleet.workers_goal,
                cores=fleet.cores_goal,
                cores_now=fleet.cores,
                after_s=GRANT_S,
                workers_now=0 if stranded else fleet.placement.workers,
            )
        )


__all__ = ["GRANT_S", "OVERDUE_S", "REFUSED_S", "ROOM_TIMEOUT_S", "Phase", "step"]
