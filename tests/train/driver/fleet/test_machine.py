"""What a run wants: the transitions one by one, and the laws that hold whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offload.errors import ConfigError
from offload.model.batch_split import BatchSplit
from offload.model.placement import NodeResources, WorkerResources, bundle_of
from offload.report.events.decisions import EventIgnored, ReadyToResize, ResizeCost, Resized
from offload.report.events.faults import NotStarted
from offload.report.events.training import CheckpointWritten, FirstStep
from offload.train.driver.fleet.messages import (
    Action,
    Ask,
    ClusterSeen,
    CoresWanted,
    EntriesFollowed,
    Event,
    Ignored,
    Learned,
    NewsRead,
    PauseAsked,
    Publish,
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
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import (
    FIRST_RESTART_S,
    Committing,
    Fleet,
    MakingRoom,
    Paused,
    Starting,
    Steady,
    Stranded,
    orders_of,
)
from offload.train.driver.fleet.state_machine import GRANT_S, OVERDUE_S, OWN_ROOM_S, REFUSED_S, step
from offload.train.messages import News, Orders
from tests.train.driver.fleet.made_up import NOTHING, ONE_MORE, WORKER, Run, cpu_node, gpu_node, group, split_of

GPU, GPU_2, CPU = gpu_node("gpu"), gpu_node("gpu 2"), cpu_node("cpu")
TRAINS = group(1, nodes=["gpu"])

# --- the start --------------------------------------------------------------------------------------------------------


def started(
    *nodes: NodeResources, now_s: float = 0.0, whole: Any = (), held: str = "", by_us: bool = False, **terms: Any
) -> Any:
    given = Terms(worker=WORKER, bounds=(1, 2), first=(1, 2), **terms)
    seen = ClusterSeen(now_s=now_s, nodes=nodes, whole=whole, held=held, by_us=by_us)
    return step(Starting(terms=given, since_s=0.0, ours_since_s=0.0 if by_us else None), seen)


def test_a_run_that_may_ask_for_nodes_waits_for_them_and_then_names_what_is_missing() -> None:
    state, actions = started(CPU, grows=True)
    assert isinstance(state, Starting)
    assert actions == (
        Ask(missing={ONE_MORE: 1, bundle_of({"CPU": 1.0}): 1}, hold=True),
        Show(text="waiting for nodes with room for 1 × 1 CPU + 1 GPU, 1 × 1 CPU"),
    )
    with pytest.raises(ConfigError, match=r"did not come within 900 s \(nodes_deadline_s\): 1 worker asks for 1 GPU"):
        started(CPU, grows=True, now_s=901.0)
    fleet, actions = started(CPU, GPU, grows=True)
    assert isinstance(fleet, Fleet)
    assert Ask(missing={}) in actions


def test_a_run_waits_for_room_that_others_hold_only_where_the_whole_cluster_would_do() -> None:
    state, (shown,) = started(CPU, whole=(CPU, GPU), held="1 of 1 GPU")
    assert isinstance(state, Starting)
    assert shown == Show(text="waiting for room: other programs hold 1 of 1 GPU")
    for more in ({"whole": (CPU,), "held": "3 of 8 CPU"}, {}):
        with pytest.raises(ConfigError, match="1 worker asks for 1 GPU"):
            started(CPU, **more)


def test_a_run_does_not_wait_for_ever_for_what_its_own_program_holds() -> None:
    held: Any = {"whole": (CPU, GPU), "held": "1 of 1 GPU (actor Counter 1 CPU)"}
    for seen in ({"by_us": True, "now_s": OWN_ROOM_S}, {"by_us": False, "now_s": 1e6}):
        state, _ = started(CPU, **held, **seen)
        assert isinstance(state, Starting)
    with pytest.raises(
        ConfigError, match=r"waited 61 s for CPUs that this program itself holds, .*actor Counter 1 CPU\)"
    ):
        started(CPU, **held, by_us=True, now_s=OWN_ROOM_S + 1)
    # Only the time counts for which nobody else held some of it.
    alone = ClusterSeen(nodes=(CPU,), by_us=True, **held, now_s=1e6)
    waiting, _ = started(CPU, **held, now_s=1e6)
    waiting, _ = step(waiting, alone)
    assert isinstance(waiting, Starting)
    with pytest.raises(ConfigError, match="waited 61 s for CPUs"):
        step(waiting, replace(alone, now_s=1e6 + OWN_ROOM_S + 1))


def test_without_a_range_there_are_as_many_workers_as_fit_and_later_no_more() -> None:
    fleet, _ = started(CPU, GPU, GPU_2, chosen=False)
    assert (fleet.placement.workers, fleet.bounds) == (2, (1, 2))
    assert orders_of(fleet).workers == 2


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_counts_that_do_not_fit_are_options_where_nodes_can_be_asked_for() -> None:
    run = Run(GPU, CPU, bounds=(1, 3))
    assert [(o.workers, o.nodes, o.cores) for o in run.fleet.options()] == [(1, 1, 11), (2, 2, 14), (3, 3, 17)]
    assert not run.autoscaler.missing
    run.conductor.handle(WorkersWanted(workers=3))
    run.look(TRAINS, GPU, CPU)
    assert run.autoscaler.missing == {ONE_MORE: 2}
    run.look(replace(TRAINS, running=False), GPU, CPU)
    assert not run.autoscaler.missing, "what is asked for could take the room of workers that start"
    run.look(TRAINS, GPU, CPU)
    assert run.autoscaler.missing == {ONE_MORE: 2}
    run.conductor.handle(WorkersWanted(workers=1))
    run.look(TRAINS, GPU, CPU)
    assert not run.autoscaler.missing
    assert [o.workers for o in Run(GPU, CPU, bounds=(1, 3), grows=False).fleet.options()] == [1]


def test_a_node_for_workers_that_holds_none_is_released_so_that_the_cluster_can_take_it_back() -> None:
    spare = gpu_node("spare")
    run = Run(GPU, CPU)
    run.look(TRAINS, GPU, spare, CPU)
    assert "spare" not in run.hub.cores
    assert not run.autoscaler.missing
    run.conductor.handle(WorkersWanted(workers=2))
    run.look(TRAINS, GPU, spare, CPU, cpu_node("another"))
    assert run.hub.cores.count("spare") == 4  # it preprocesses until its worker comes


def test_what_a_lost_worker_needs_is_asked_for_again() -> None:
    run = Run(GPU, CPU, bounds=(1, 1))
    run.look(TRAINS, CPU)
    assert run.hub.orders.workers == 0
    assert run.autoscaler.missing == {ONE_MORE: 1}
    run.look(TRAINS, CPU, gpu_node("new"))
    assert run.hub.orders.workers == 1
    assert not run.autoscaler.missing


def test_a_run_that_waits_for_a_node_goes_on_asking_and_one_that_trains_asks_again_later() -> None:
    run = Run(GPU, CPU)
    run.conductor.handle(WorkersWanted(workers=2))
    seen = []
    for run.now_s in (0.0, GRANT_S + 1, GRANT_S + REFUSED_S + 2):
        run.look(TRAINS, GPU, CPU)
        run.look(TRAINS, GPU, CPU)
        seen.append(bool(run.autoscaler.missing))
    assert seen == [True, False, True]
    for hours in range(3):
        run.now_s += 3600.0 * hours
        run.look(TRAINS, CPU)
        run.conductor.handle(CoresWanted(cores=3))  # nothing can be placed, and nothing breaks
        assert run.autoscaler.missing
    assert run.hub.orders.workers == 0


def test_dollars_count_the_cores_that_more_workers_would_need() -> None:
    run = Run(GPU, CPU, usd_per_hour={"ml.A10G": 1.4, "ml.c5.2xlarge": 0.4}, cores=(1, 100))
    run.conductor.handle(CoresWanted(cores=11))
    one, two = run.fleet.options()
    assert (one.elastic, two.elastic) == (True, True), "the decision chooses the cores"
    assert one.usd_with(11) == pytest.approx(1.4 + 8 * 0.05), "3 of 11 cores are on the worker's node"
    assert two.usd_with(22) == pytest.approx(2 * 1.4 + 16 * 0.05)
    assert one.usd_with(2) == pytest.approx(1.4), "a node's own cores cost nothing beside its workers"


# --- changes ----------------------------------------------------------------------------------------------------------


def test_a_change_makes_room_commits_and_ends_when_the_next_group_trains() -> None:
    run = Run(GPU, GPU_2, CPU, grows=False)
    run.look(TRAINS, GPU, GPU_2, CPU)
    run.conductor.handle(ResizeDecided(split=split_of(2)))
    assert run.hub.cores.count("gpu 2") == 3
    assert (run.hub.orders.workers, run.hub.orders.end_of(1)) == (1, ""), "the workers train while room is made"
    run.hub.room.made = True
    run.look(TRAINS, GPU, GPU_2, CPU)
    assert (run.hub.orders.workers, run.hub.orders.end_of(1), run.hub.orders.split) == (2, "resize", split_of(2))
    run.look(replace(TRAINS, attempts=2, running=False, group=NOTHING.group), GPU, GPU_2, CPU)
    assert run.fleet.busy
    run.look(group(2, attempt=2), GPU, GPU_2, CPU)
    assert not run.fleet.busy
    assert run.events(Resized) == [Resized(workers_before=1, workers=2)]
    assert run.hub.orders.end_of(2) == ""
    assert run.hub.cores.count("gpu 2") == 3


def test_a_group_that_started_before_the_orders_came_makes_way_too() -> None:
    """The workers failed, and were started again as many as before, while the room was made for more."""
    run = Run(GPU, GPU_2, CPU, grows=False)
    run.look(TRAINS, GPU, GPU_2, CPU)
    run.conductor.handle(ResizeDecided(split=split_of(2)))
    run.hub.room.made = True
    run.look(TRAINS, GPU, GPU_2, CPU)
    run.look(group(1, attempt=2, failures=1), GPU, GPU_2, CPU)
    assert run.fleet.busy
    assert run.hub.orders.end_of(2) == "resize"
    run.look(group(2, attempt=3, failures=1), GPU, GPU_2, CPU)
    assert not run.fleet.busy


def test_a_node_that_joins_does_not_end_a_change_that_is_under_way() -> None:
    run = Run(GPU, GPU_2, CPU)
    run.conductor.handle(ResizeDecided(split=split_of(2)))
    run.look(TRAINS, GPU, GPU_2, CPU, cpu_node("late"))
    assert isinstance(run.fleet.phase, MakingRoom)
    assert run.hub.cores.count("late") == 0  # it begins to preprocess when the change is over
    assert run.hub.orders.end_of(1) == ""


def test_a_second_change_is_refused_while_one_is_under_way_and_that_is_written_down() -> None:
    run = Run(GPU, GPU_2, CPU)
    run.conductor.handle(ResizeDecided(split=split_of(2)), ResizeDecided(split=split_of(1)))
    assert run.events(EventIgnored) == [EventIgnored(what="ResizeDecided", reason="another change is under way")]


def test_what_was_lost_is_used_again_where_the_number_is_not_chosen() -> None:
    run = Run(GPU, GPU_2, CPU, started=2, chosen=False)
    both = group(2, nodes=["gpu", "gpu 2"])
    run.look(both, GPU, GPU_2, CPU)
    run.look(replace(both, failures=1, running=False), GPU, CPU)
    orders = run.hub.orders
    assert (orders.workers, orders.end_of(1), orders.without_commit, orders.failures_seen) == (1, "resize", True, 1)
    run.look(group(1, attempt=2, failures=1), GPU, CPU)
    assert run.autoscaler.missing == {ONE_MORE: 1}
    run.look(group(1, attempt=2, failures=1), GPU, CPU, gpu_node("new"))
    assert isinstance(run.fleet.phase, MakingRoom)
    assert run.fleet.phase.next.workers == 2
    assert not run.autoscaler.missing


def test_on_a_cluster_that_is_not_asked_for_nodes_workers_come_back_too() -> None:
    run = Run(GPU, GPU_2, CPU, started=2, chosen=False, grows=False)
    run.look(group(2, nodes=["gpu", "gpu 2"]), GPU, CPU)
    assert run.hub.orders.workers == 1
    run.look(group(1, attempt=2), GPU, CPU)
    run.look(group(1, attempt=2), GPU, GPU_2, CPU)
    assert run.fleet.busy
    assert not run.autoscaler.missing


def test_workers_come_back_though_decisions_about_batches_found_the_fewer_ones_right() -> None:
    run = Run(GPU, GPU_2, CPU, started=2, chosen=False)
    run.look(group(2, nodes=["gpu", "gpu 2"]), GPU, CPU)
    run.look(group(1, attempt=2), GPU, CPU)
    run.conductor.handle(WorkersWanted(workers=1))  # as the tuner says that the present number should stay
    run.look(group(1, attempt=2), GPU, CPU)
    assert run.autoscaler.missing == {ONE_MORE: 1}
    run.look(group(1, attempt=2), GPU, CPU, gpu_node("new"))
    assert isinstance(run.fleet.phase, MakingRoom)
    assert run.fleet.phase.next.workers == 2


def test_workers_come_back_to_a_node_that_is_there_again_before_the_others_have_started() -> None:
    run = Run(GPU, GPU_2, CPU, started=2, chosen=False, grows=False)
    both = group(2, nodes=["gpu", "gpu 2"])
    run.look(both, GPU, GPU_2, CPU)
    again = (GPU, CPU, gpu_node("gpu 2 again"))
    run.look(replace(both, failures=1, running=False), GPU, CPU)
    run.look(replace(both, failures=1, running=False), *again)
    assert run.hub.orders.workers == 1, "a change that is under way ends first"
    run.look(group(1, attempt=2, nodes=["gpu"], failures=1), *again)
    assert isinstance(run.fleet.phase, MakingRoom)
    run.hub.room.made = True
    run.look(group(1, attempt=2, nodes=["gpu"], failures=1), *again)
    assert (run.hub.orders.workers, run.hub.orders.end_of(2)) == (2, "resize")
    run.look(group(2, attempt=3, nodes=["gpu", "gpu 2 again"], failures=1), *again)
    assert not run.fleet.busy
    assert run.fleet.placement.workers == 2


def test_workers_under_notice_commit_at_once_and_start_elsewhere() -> None:
    run = Run(GPU, GPU_2, CPU, grows=False)
    run.look(group(1, nodes=["gpu 2"]), GPU, GPU_2, CPU)
    run.look(group(1, nodes=["gpu 2"]), GPU, GPU_2, CPU, leaving=["gpu 2"])
    assert (run.hub.orders.workers, run.hub.orders.end_of(1)) == (0, "resize"), "they commit while room is made"
    assert not run.hub.orders.without_commit
    assert "gpu 2" in run.hub.orders.avoid
    run.hub.room.made = True
    run.look(group(1, nodes=["gpu 2"]), GPU, GPU_2, CPU, leaving=["gpu 2"])
    assert run.hub.orders.workers == 1


def test_workers_that_left_a_drained_node_come_back_when_another_joins() -> None:
    run = Run(GPU, GPU_2, CPU, started=2, chosen=False, grows=False)
    both = group(2, nodes=["gpu", "gpu 2"])
    run.look(both, GPU, GPU_2, CPU)
    run.look(both, GPU, GPU_2, CPU, leaving=["gpu 2"])
    run.hub.room.made = True
    run.look(both, GPU, GPU_2, CPU, leaving=["gpu 2"])
    run.look(group(1, attempt=2, nodes=["gpu"]), GPU, CPU)
    assert run.fleet.placement.workers == 1
    run.look(group(1, attempt=2, nodes=["gpu"]), GPU, CPU, gpu_node("replaced"))
    assert isinstance(run.fleet.phase, MakingRoom)
    assert run.fleet.phase.next.workers == 2


def test_a_change_whose_duration_the_clocks_do_not_tell_has_the_cost_of_the_one_before() -> None:
    run = Run(GPU, GPU_2, CPU)

    def cost_after(ready_at: float, first_step_at: float, *commits_at: float) -> float:
        commits = [CheckpointWritten(at=at, reason="resize", epoch=0, step=1, seconds=2.0) for at in commits_at]
        change = [ReadyToResize(at=ready_at, step=1), FirstStep(at=first_step_at, step=2, workers=1)]
        run.look(replace(TRAINS, events=(*commits, *change)), GPU, GPU_2, CPU)
        return run.fleet.restart.cost_s

    assert cost_after(1e9, 1e9 + 10.0) == FIRST_RESTART_S, "there was nothing to commit yet"
    assert cost_after(1e9, 1e9 + 10.0, 1e9) == 12.0
    assert cost_after(2e9, 2e9 - 30.0, 2e9) == 12.0, "the first step was on a host whose clock is behind"
    assert cost_after(3e9, 3e9 + 5.0, 3e9) == 7.0
    assert [event.without_steps_s for event in run.events(ResizeCost)] == [12.0, 7.0]


# --- workers that do not start ----------------------------------------------------------------------------------------


def late(run: Run, now_s: float, attempts: int = 0, failures: int = 0, running: bool = False) -> list[NotStarted]:
    run.now_s = now_s
    run.look(replace(NOTHING, attempts=attempts, failures=failures, running=running), GPU, CPU)
    return run.events(NotStarted)


def test_workers_that_do_not_start_are_reported_once_with_what_is_free() -> None:
    run = Run(GPU, CPU)
    run.conductor._free = lambda: {"a": {"CPU": 1.0, "GPU": 1.0}, "b": {"CPU": 0.5}}
    assert [len(late(run, now_s)) for now_s in (2.0, OVERDUE_S - 1, OVERDUE_S, OVERDUE_S + 2)] == [0, 0, 1, 1]
    assert run.events(NotStarted)[0].sentence({}) == (
        "no worker has started for 60 s: they need 1 × (1 CPU and 1 GPU), and 1.5 CPU and 1 GPU of the cluster are free. They "
        "may be starting slowly, or other programs hold the resources; training then begins when those end"
    )
    # They start, fail, and find no room again: the user hears of that, too.
    late(run, 100.0, attempts=1, running=True)
    late(run, 200.0, attempts=1, failures=1)
    assert len(late(run, 200.0 + OVERDUE_S, attempts=1, failures=1)) == 2
    # Others start, and their function takes its time before the first step.
    late(run, 900.0, attempts=2, failures=2, running=True)
    assert len(late(run, 1000.0, attempts=3, failures=2)) == 2


def test_workers_that_were_not_wanted_are_not_late() -> None:
    run = Run(GPU, CPU)
    run.look(NOTHING, CPU)  # nothing fits
    run.now_s = OVERDUE_S + 10
    run.look(NOTHING, CPU)
    assert not late(run, OVERDUE_S + 12)
    assert late(run, 2 * OVERDUE_S + 13)


# --- laws -------------------------------------------------------------------------------------------------------------

NAMES = ("gpu a", "gpu b", "gpu c", "cpu a", "cpu b")
ALL = {name: gpu_node(name, gpus=2) if name.startswith("gpu") else cpu_node(name) for name in NAMES}


class Everything(RuleBasedStateMachine):
    """Random events in any order: nodes come, leave and get notice, decisions, failures and restarts of workers, room that is made or
    not, and a world that carries out the newest orders, late."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = {name: ALL[name] for name in ("gpu a", "gpu b", "cpu a")}
        self.noticed: set[str] = set()
        self.now_s = 0.0
        self.attempt, self.workers, self.failures = 0, 0, 0
        self.worker_nodes: tuple[str, ...] = ()
        self.delivered = Orders()
        self.reshapes: list[int] = []
        self.asked: dict[Any, int] = {}
        self.learned: dict[str, Any] | None = None
        self.split: BatchSplit | None = None
        self.entries = 0
        self.stopped = False
        self.state: Any = None

    @initialize(chosen=st.booleans(), grows=st.booleans(), most=st.integers(1, 5))
    def begin(self, chosen: bool, grows: bool, most: int) -> None:
        terms = Terms(worker=WORKER, bounds=(1, most), first=(1, most), chosen=chosen, grows=grows)
        self.state = Starting(terms=terms)
        self.take(ClusterSeen(now_s=0.0, nodes=tuple(self.alive.values())))

    def take(self, event: Event) -> tuple[Action, ...]:
        before = self.state
        self.state, actions = step(before, event)
        for action in actions:
            if isinstance(action, Ask):
                self.asked = dict(action.missing)
            number = getattr(action, "number", None)
            if number is not None and getattr(action, "timeout_s", 0.0):
                self.reshapes.append(number)
        changed = replace(self.state, now_s=0.0) != replace(before, now_s=0.0) if isinstance(before, Fleet) else True
        quiet = (
            NewsRead, ClusterSeen, WorkersWanted, CoresWanted, EntriesFollowed, StopAsked, SplitDecided, Learned, WorkersEnded
        )  # fmt: skip
        assert changed or actions or isinstance(event, quiet), f"{event} vanished in {before.phase}"
        return actions

    # -- what happens --

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.noticed:
            self.alive[name] = ALL[name]

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        if self.alive.pop(name, None) is not None and name.startswith("gpu") and self.workers:
            self.fail()

    @rule(name=st.sampled_from(NAMES))
    def notice(self, name: str) -> None:
        if name in self.alive:
            self.noticed.add(name)

    @rule()
    def fail(self) -> None:
        if self.workers:
            self.workers, self.worker_nodes, self.failures = 0, (), self.failures + 1

    @rule(workers=st.integers(1, 6))
    def decide(self, workers: int) -> None:
        fits = self.state.fits(workers) and workers <= self.state.bounds[1] and not self.state.busy and not self.stopped
        actions = self.take(ResizeDecided(split=split_of(workers)))
        assert any(isinstance(action, Ignored) for action in actions) == (not fits)

    @rule(workers=st.integers(1, 6), cores=st.integers(1, 30), number=st.integers(0, 4))
    def tune(self, workers: int, cores: int, number: int) -> None:
        self.learned, self.entries = {"delivered": number / 10}, max(number, self.entries)
        self.take(WorkersWanted(workers=workers))
        self.take(CoresWanted(cores=cores))
        self.take(SplitDecided(split=BatchSplit(workers=2, local_batch_size=cores, accum_steps=0)))
        self.take(Learned(state=self.learned))
        self.take(EntriesFollowed(entries=number))

    @rule(really=st.integers(0, 9))
    def stop(self, really: int) -> None:
        if really:
            return
        self.stopped = True
        self.take(StopAsked())

    @rule(really=st.integers(0, 4))
    def pause(self, really: int) -> None:
        if not really:
            self.take(PauseAsked())

    @rule()
    def workers_have_ended(self) -> None:
        """Those of a paused run: the newest orders have reached them."""
        if isinstance(self.state.phase, Paused):
            self.deliver()
            self.workers, self.worker_nodes = 0, ()
            self.take(WorkersEnded(serial=self.state.published.serial))

    @rule()
    def resume(self) -> None:
        self.take(ResumeAsked())
        assert self.stopped or not (isinstance(self.state.phase, Paused) and self.state.phase.released)

    @rule(seconds=st.floats(0.0, 2000.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(newest=st.booleans())
    def room_is_made(self, newest: bool) -> None:
        if self.reshapes:
            number, phase = self.reshapes.pop(-1 if newest else 0), self.state.phase
            actions = self.take(RoomMade(number=number))
            awaited = isinstance(phase, MakingRoom | Paused) and phase.reshape == number
            assert awaited != any(isinstance(action, Ignored) for action in actions), (
                "room for a change that was given up"
            )

    @rule()
    def look(self) -> None:
        status = group(self.workers).group if self.workers else NOTHING.group
        news = replace(
            NOTHING,
            attempts=self.attempt,
            failures=self.failures,
            running=self.workers > 0,
            group=status,
            worker_nodes=self.worker_nodes,
        )
        self.take(NewsRead(now_s=self.now_s, news=news))
        leaving = frozenset(self.noticed & self.alive.keys())
        busy = self.state.busy
        self.take(ClusterSeen(now_s=self.now_s, nodes=tuple(self.alive.values()), leaving=leaving))
        if busy and isinstance(self.state.phase, MakingRoom | Committing):
            assert not self.asked, "what is asked for could take the room of workers that start"
        ends = self.state.published.end_of(self.attempt)
        if self.workers and not leaving.isdisjoint(self.worker_nodes):
            assert ends if isinstance(self.state.phase, Stranded) else self.state.busy, "nodes leave with their workers"

    @rule()
    def all_goes_well(self) -> None:
        self.look()
        self.deliver()
        self.world()
        self.look()

    @rule()
    def deliver(self) -> None:
        """The newest orders reach the hub."""
        self.delivered = self.state.published

    @rule()
    def world(self) -> None:
        """Ray Train and the workers do what the orders say that have reached the hub."""
        orders = self.delivered
        ended = self.workers and orders.end_of(self.attempt) == "resize"
        idle = not self.workers and orders.failures_seen >= self.failures and not self.stopped
        if orders.workers and (ended or idle):
            self.attempt, self.workers = self.attempt + 1, orders.workers
            nodes = [node.node_id for node in self.state.nodes.usable if node.gpus][: orders.workers]
            self.worker_nodes = tuple(nodes)

    # -- what holds --

    @invariant()
    def orders_follow_from_the_state(self) -> None:
        if self.state is not None:
            assert orders_of(self.state) == self.state.published

    @invariant()
    def there_are_never_more_workers_than_fit(self) -> None:
        if self.state is None:
            return
        placements = [self.state.placement] + (
            [self.state.phase.next] if isinstance(self.state.phase, MakingRoom | Committing) else []
        )
        assert all(1 <= placement.workers <= self.state.bounds[1] for placement in placements)
        if self.state.workers and not isinstance(self.state.phase, Stranded):
            target = placements[-1]
            assert target.workers == self.state.workers or not isinstance(self.state.phase, Committing)

    @invariant()
    def a_paused_run_starts_nothing(self) -> None:
        if self.state is not None and isinstance(self.state.phase, Paused):
            assert self.state.published.workers == 0
            assert self.state.phase.reshape is None or not self.state.used
            assert not self.asked

    @invariant()
    def what_was_learned_is_never_lost(self) -> None:
        if self.state is not None:
            orders = self.state.published
            assert (orders.learned, orders.entries_followed, orders.stop) == (self.learned, self.entries, self.stopped)

    def teardown(self) -> None:
        """Once nothing happens any more, what has begun ends: every change, and every request that has come true."""
        if self.state is None:
            return
        self.noticed.clear()
        for name in NAMES:
            self.alive[name] = replace(ALL[name], node_id=f"{name} again")
        for _ in range(12):
            self.now_s += 1.0
            self.look()
            self.workers_have_ended()
            self.resume()
            while self.reshapes:
                self.take(RoomMade(number=self.reshapes.pop(0)))
            self.deliver()
            if not self.stopped:
                self.world()
        if not self.stopped:
            assert isinstance(self.state.phase, Steady), self.state.phase
            assert self.workers == self.state.placement.workers
            assert self.state.fits(self.workers)
            room, goals = self.state.room, (self.state.cores_goal, self.state.workers_goal)
            assert self.asked == ({} if self.state.refused else room.missing(self.state.placement, *goals))


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_an_event_of_a_run_that_has_not_started_is_refused() -> None:
    state = Starting(terms=Terms(worker=WorkerResources(cpus=1), bounds=(1, 1), first=(1, 1)))
    for event in (StopAsked(), NewsRead(now_s=0.0, news=News(**vars(NOTHING))), RoomMade(number=1)):
        after, (ignored,) = step(state, event)
        assert after is state
        assert isinstance(ignored, Ignored)


def test_late_workers_and_orders_are_actions_of_their_own() -> None:
    fleet, _ = started(GPU, CPU)
    _, actions = step(fleet, NewsRead(now_s=OVERDUE_S + 1, news=NOTHING))
    assert any(isinstance(action, TellNotStarted) for action in actions)
    _, actions = step(fleet, StopAsked())
    assert [action.orders.stop for action in actions if isinstance(action, Publish)] == [True]
