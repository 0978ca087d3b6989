"""What a run answers to those who steer it, and how it obeys: its desk and its state machine, without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import runs
from offload.errors import ConfigError
from offload.model.placement import NodeResources
from offload.train.config import BatchSize
from offload.train.driver.steering import Steering, StoppedError
from offload.train.steering.desk import Desk
from offload.train.steering.messages import Command, Reply, RunState
from tests.train.driver.fleet.made_up import NOTHING, Run, cpu_node, gpu_node, group, split_of

SIZES = BatchSize(initial=16)
GPU, GPU_2, CPU = gpu_node("gpu"), gpu_node("gpu 2"), cpu_node("cpu")


class OwnDesk:
    """A run's own side of a desk in this process. ``ask`` leaves a command there."""

    def __init__(self) -> None:
        self.state = RunState(name="vit", user="ana", host="head", pid=1, run_dir="/runs/vit", since=0.0)
        self.desk = Desk(self.state)
        self.shows = 0
        self._tell: Callable[[int, Command], None] = lambda number, command: None

    def show(self, state: RunState) -> None:
        self.state = state
        self.shows += 1
        self.desk.show(self.shows, state)

    def reply(self, number: int, reply: Reply) -> None:
        self.desk.reply(number, reply)

    def hear(self, tell: Callable[[int, Command], None]) -> None:
        self._tell = tell

    def wait_for_watch(self) -> None: ...

    def ask(self, command: Command) -> int:
        number = self.desk.ask(command)
        self._tell(number, command)
        return number

    def shown(self) -> tuple[str, str]:
        """The state that others see, and its reason."""
        return self.desk.state().state, self.desk.state().reason

    def answer(self, number: int) -> Reply | None:
        return self.desk.replied(number, 0.0)


class Steered:
    """A run with one worker, on nodes for two, and its desk."""

    def __init__(self, *nodes: NodeResources) -> None:
        self.nodes = nodes or (GPU, GPU_2, CPU)
        self.run = Run(*self.nodes)
        self.desk, self.said = OwnDesk(), list[str]()
        self.steering = Steering(self.desk, lambda: None, self.said.append)
        self.run.look(group(1, nodes=["gpu"]), *self.nodes)

    def heed(self) -> bool:
        """Let the run obey, and return whether it must stop."""
        events, stop = self.steering.heed(self.run.fleet, split_of(self.run.fleet.placement.workers), SIZES)
        for event in events:
            self.run.conductor.handle(event)
        return stop

    def homes(self) -> tuple[str, ...]:
        """The nodes that the workers are ordered to."""
        return self.run.hub.orders.homes

    def ask(self, command: Command) -> Reply | None:
        """The answer that comes at once."""
        number = self.desk.ask(command)
        self.heed()
        return self.desk.answer(number)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Command(action="resume"), "it is not paused"),
        (Command(action="resize", workers=3), "it may have from 1 to 2 workers, and 3 was asked for"),
        (Command(action="resize", workers=1, nodes={"gpu 3": 1}), "it may not use a node gpu 3, but cpu, gpu, gpu 2"),
        (Command(action="resize", workers=2, nodes={"gpu": 2}), "its workers do not fit as 2 on gpu"),
    ],
)
def test_a_run_refuses_what_it_cannot_do_and_names_what_it_can(command: Command, text: str) -> None:
    assert Steered().ask(command) == Reply(text=text, done=False)


def test_a_run_refuses_more_workers_than_have_room() -> None:
    refused = Reply(text="the cluster has room for at most 1 of its workers now, and 2 were asked for", done=False)
    assert Steered(GPU, CPU).ask(Command(action="resize", workers=2)) == refused


def test_workers_go_to_the_nodes_that_were_chosen_and_the_answer_comes_when_they_are_there() -> None:
    steered = Steered()
    number = steered.desk.ask(Command(action="resize", workers=1, nodes={"gpu 2": 1}))
    steered.heed()
    assert steered.desk.answer(number) is None
    steered.run.hub.room.made = True
    steered.run.look(group(1, nodes=["gpu"]), *steered.nodes)
    steered.run.look(group(1, attempt=2, nodes=["gpu 2"]), *steered.nodes)
    assert steered.homes() == ("gpu 2",)
    steered.heed()
    assert steered.desk.answer(number) == Reply(text="resized to 1 worker")
    # The node that was chosen is lost: the workers may go anywhere.
    steered.run.look(NOTHING, GPU, CPU)
    assert steered.homes() == ()


def test_commands_wait_for_their_turn_and_the_end_answers_those_that_are_left() -> None:
    steered = Steered()
    pause, resume = (steered.desk.ask(Command(action=action)) for action in ("pause", "resume"))
    steered.heed()
    assert steered.desk.answer(pause) is None
    steered.steering.end()
    assert steered.desk.answer(pause) == steered.desk.answer(resume) == Reply(text="it has ended", done=False)


def test_a_stop_is_answered_by_the_end_of_the_run() -> None:
    steered = Steered()
    number = steered.desk.ask(Command(action="stop"))
    assert steered.heed()
    assert steered.desk.answer(number) is None
    steered.steering.end()
    assert steered.desk.answer(number) == Reply(text="stopped")


def test_a_run_that_waits_to_start_can_be_paused_resumed_and_stopped_but_not_resized() -> None:
    desk, said = OwnDesk(), list[str]()
    steering = Steering(desk, lambda: None, said.append)
    steering.waits("other programs hold 1 of 1 GPU")
    assert desk.shown() == ("waiting", "other programs hold 1 of 1 GPU")
    asked = [desk.ask(Command(action=action, workers=1)) for action in ("resume", "resize", "pause")]
    assert steering.heed_before_start()
    refusals = ["it is not paused", "it waits to start, and has no workers yet"]
    assert [answer.text for answer in map(desk.answer, asked[:2]) if answer and not answer.done] == refusals
    assert said == ["paused: the run holds nothing on the cluster; it goes on with: offload runs resume vit"]
    assert desk.shown() == ("paused", "paused before it began to train")
    desk.ask(Command(action="resume"))
    assert not steering.heed_before_start()
    assert desk.shown() == ("waiting", "")
    desk.ask(Command(action="stop"))
    with pytest.raises(StoppedError):
        steering.heed_before_start()


def test_nodes_must_have_places_for_all_workers() -> None:
    with pytest.raises(ConfigError, match="nodes has places for 1 workers, and workers=2: make them equal"):
        runs.resize("vit", 2, nodes={"gpu": 1})


@given(st.permutations(range(1, 6)))
def test_others_see_the_newest_state_in_whatever_order_states_arrive(order: list[int]) -> None:
    first = OwnDesk().state
    desk = Desk(first)
    for number in order:
        desk.show(number, replace(first, reason=str(number)))
    assert desk.state().reason == "5"
