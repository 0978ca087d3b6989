"""Show a run to others, and let them steer it: what they ask of it becomes events of the state machine, and its state becomes answers.

Where it stops: :mod:`offload.train.driver.fleet` decides what a pause or another number of workers changes.
"""

from __future__ import annotations

import dataclasses
import queue
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from offload.errors import RunError
from offload.model.batch_split import BatchSplit
from offload.train.config import BatchSize
from offload.train.driver.fleet.messages import Event, PauseAsked, ResizeDecided, ResumeAsked
from offload.train.driver.fleet.state import Committing, Fleet, MakingRoom, Paused, Stranded
from offload.train.driver.platform.platform import RunDesk
from offload.train.messages import News
from offload.train.steering.messages import Command, Reply, State

ENDED = "it has ended"


class StoppedError(RunError):
    """Somebody has stopped the run while it waited to start."""


class Steering:
    """The run's side of its desk. One thread uses it, apart from :meth:`_heard`.

    Args:
        desk: the desk; None: nobody sees or steers the run.
        changed: called from another thread when there is a command.
        say: prints a line for the user.
    """

    def __init__(self, desk: RunDesk | None, changed: Callable[[], None], say: Callable[[str], None]) -> None:
        self._desk, self._changed, self._say = desk, changed, say
        self._inbox: queue.SimpleQueue[tuple[int, Command]] = queue.SimpleQueue()
        self._waiting: deque[tuple[int, Command]] = deque()
        self._under_way: tuple[int, Command] | None = None
        self._paused = False  # before the start
        if desk is not None:
            desk.hear(self._heard)

    def _heard(self, number: int, command: Command) -> None:
        self._inbox.put((number, command))
        self._changed()

    # -- before the start ------------------------------------------------------------------------------------------

    def waits(self, reason: str) -> None:
        """Show what the run waits for before it starts."""
        if self._desk is not None and not self._paused:
            self._desk.show(replace(self._desk.state, state="waiting", reason=reason))

    def heed_before_start(self) -> bool:
        """Obey commands while the run waits to start. Return whether it is paused. Raises StoppedError if it has been stopped."""
        self._take()
        while self._waiting:
            number, command = self._waiting.popleft()
            if command.action == "stop":
                self._reply(number, Reply(text="stopped before it began to train"))
                raise StoppedError("the run was stopped from outside while it waited to start.")
            self._reply(number, self._before_start(command))
        return self._paused

    def _before_start(self, command: Command) -> Reply:
        if command.action == "resize":
            return Reply(text="it waits to start, and has no workers yet", done=False)
        pauses = command.action == "pause"
        if pauses == self._paused:
            return Reply(text="it is already paused" if pauses else "it is not paused", done=False)
        self._paused = pauses
        if self._desk is not None:
            reason = "paused before it began to train" if pauses else ""
            self._desk.show(replace(self._desk.state, state="paused" if pauses else "waiting", reason=reason))
        if pauses:
            self._say(PAUSED.format(name=self.name))
        return Reply(text="paused: it does not start, and holds nothing" if pauses else "resumed")

    # -- under way -------------------------------------------------------------------------------------------------

    def heed(self, fleet: Fleet, split: BatchSplit, sizes: BatchSize) -> tuple[list[Event], bool]:
        """The events by which the run obeys what others ask of it, and whether it must stop. ``split``: the present split of global
        batches."""
        self._take()
        if self._under_way is not None:
            number, command = self._under_way
            if (reply := outcome(command, fleet)) is None:
                return [], command.action == "stop"
            self._under_way = None
            self._reply(number, reply)
            if reply.done and command.action == "pause":
                self._say(PAUSED.format(name=self.name))
        while self._waiting:
            number, command = self._waiting[0]
            obeyed = obey(command, fleet, split, sizes)
            if obeyed is None:
                break
            self._waiting.popleft()
            if isinstance(obeyed, Reply):
                self._reply(number, obeyed)
                continue
            self._under_way = number, command
            return obeyed, command.action == "stop"
        return [], False

    def show(self, fleet: Fleet, news: News, goodput: float | None, reason: str = "") -> None:
        """Show the run's state."""
        if self._desk is None:
            return
        state, why = state_of(fleet, news)
        self._desk.show(
            replace(
                self._desk.state,
                state=state,
                reason=why or reason,
                workers=0 if state in ("paused", "waiting", "starting") else news.group.workers,
                cores=max(news.cores[0] - news.cores[1], 0),
                goodput=goodput,
                bounds=fleet.bounds,
            )
        )

    def end(self) -> None:
        """Answer what is left: the run is over."""
        self._take()
        if self._under_way is not None:
            number, command = self._under_way
            stopped = command.action == "stop"
            self._reply(number, Reply(text="stopped" if stopped else ENDED, done=stopped))
        for number, _ in self._waiting:
            self._reply(number, Reply(text=ENDED, done=False))
        self._waiting.clear()
        self._under_way = None

    @property
    def name(self) -> str:
        """The run's name on the cluster; empty without a desk."""
        return "" if self._desk is None else self._desk.state.name

    def _take(self) -> None:
        while not self._inbox.empty():
            self._waiting.append(self._inbox.get())

    def _reply(self, number: int, reply: Reply) -> None:
        if self._desk is not None:
            self._desk.reply(number, reply)


PAUSED = "paused: the run holds nothing on the cluster; it goes on with: offload runs resume {name}"


def obey(command: Command, fleet: Fleet, split: BatchSplit, sizes: BatchSize) -> list[Event] | Reply | None:
    """The events by which a run obeys a command, or its answer if it needs none or refuses. None: later, since a change is under way."""
    paused = isinstance(fleet.phase, Paused)
    if fleet.stop:
        return Reply(text="it is ending", done=False)
    if isinstance(fleet.phase, Paused) and fleet.phase.for_others:
        return None if command.action == "pause" else _while_others_go_first(command)
    match command.action:
        case "stop":
            return []
        case "pause":
            return Reply(text="it is already paused", done=False) if paused else [PauseAsked()]
        case "resume":
            return [ResumeAsked()] if paused else Reply(text="it is not paused", done=False)
        case "resize" if fleet.lease is not None:
            return Reply(text="the arbiter chooses its workers: offload arbiter status shows why", done=False)
        case "resize":
            return _resize(command, fleet, split, sizes)


def _while_others_go_first(command: Command) -> list[Event] | Reply:
    """What a run does with a command while it gives up its workers for others."""
    if command.action == "stop":
        return []
    return Reply(text="it gives up its workers for others: offload arbiter status shows why", done=False)


def _resize(command: Command, fleet: Fleet, split: BatchSplit, sizes: BatchSize) -> list[Event] | Reply | None:
    workers, (least, most) = command.workers, fleet.bounds
    if not least <= workers <= most:
        allowed = f"from {least} to {most} workers" if least < most else f"{least} worker{'s' if least > 1 else ''}"
        return Reply(text=f"it may have {allowed}, and {workers} was asked for", done=False)
    if not fleet.terms.allowed(workers):
        return Reply(
            text=f"its batch cannot be divided among {workers} workers, as deterministic=True needs", done=False
        )
    if isinstance(fleet.phase, Paused):
        return Reply(text="it is paused: resume it first", done=False)
    if fleet.busy or not fleet.group.running:
        return None
    decided = ResizeDecided(split=sizes.carried_over(split, workers), pinned=True)
    if command.nodes:
        return _move(command.nodes, decided, fleet)
    if workers == fleet.placement.workers:
        return Reply(text=f"it already has {workers} worker{'s' if workers > 1 else ''}")
    if not fleet.fits(workers):
        room = max((n for n in range(least, most + 1) if fleet.fits(n)), default=0)
        return Reply(
            text=f"the cluster has room for at most {room} of its workers now, and {workers} were asked for", done=False
        )
    return [decided]


def _move(nodes: Mapping[str, int], decided: ResizeDecided, fleet: Fleet) -> list[Event] | Reply:
    """The events by which workers move to these nodes, or a refusal."""
    usable = fleet.nodes.usable
    allotment: Counter[str] = Counter()
    for name, workers in nodes.items():
        node = next((node for node in usable if name in (node.node_id, node.name)), None)
        if node is None:
            known = ", ".join(sorted(node.name for node in usable))
            return Reply(text=f"it may not use a node {name}, but {known}", done=False)
        allotment[node.node_id] += workers
    if fleet.room.placed_as([allotment[node.node_id] for node in usable]) is None:
        there = ", ".join(f"{workers} on {name}" for name, workers in nodes.items())
        return Reply(text=f"its workers do not fit as {there}", done=False)
    return [dataclasses.replace(decided, allotment=dict(allotment))]


def outcome(command: Command, fleet: Fleet) -> Reply | None:
    """The answer to a command that the run obeys, once it has done so."""
    phase = fleet.phase
    match command.action:
        case "pause":
            if not isinstance(phase, Paused):
                return Reply(text="it was resumed meanwhile", done=False)
            return Reply(text="paused: it holds nothing") if phase.released else None
        case "resume":
            if isinstance(phase, Stranded):
                return Reply(text="resumed: it waits for room")
            return None if fleet.busy else Reply(text=f"resumed with {fleet.placement.workers} worker(s)")
        case "resize":
            if isinstance(phase, MakingRoom | Committing):
                return None
            now, asked = fleet.placement.workers, command.workers
            if isinstance(phase, Stranded | Paused) or now != asked:
                return Reply(
                    text=f"it has {0 if fleet.busy else now} workers: the cluster changed meanwhile", done=False
                )
            return Reply(text=f"resized to {now} worker{'s' if now > 1 else ''}")
        case "stop":
            return None  # its end answers


def state_of(fleet: Fleet, news: News) -> tuple[State, str]:
    """What a run under way does, and why it does not train."""
    phase = fleet.phase
    if fleet.stop:
        return "stopping", "commits a checkpoint first"
    if fleet.lease is not None and (isinstance(phase, Stranded) or (isinstance(phase, Paused) and phase.for_others)):
        return "waiting", f"the arbiter: {fleet.lease.reason}"
    if isinstance(phase, Paused):
        if phase.released:
            return "paused", "goes on once it is resumed"
        return "pausing", "commits a checkpoint first"
    if isinstance(phase, Stranded):
        return "waiting", "no allowed number of workers fits on the cluster's nodes"
    if isinstance(phase, MakingRoom | Committing):
        now, then = fleet.placement.workers, phase.next.workers
        return ("resizing", f"{now} → {then} workers") if now != then else ("starting", f"{then} worker(s) start again")
    if not news.running:
        return "starting", f"{fleet.placement.workers} worker(s) start"
    return "training", ""
