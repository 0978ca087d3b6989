"""What the hub passes on between the driver and the workers."""

from __future__ import annotations

import inspect
import threading

from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.report.events import ReadyToResize
from offload.train.hub.actor import Hub
from offload.train.hub.board import Board
from offload.train.hub.client import HubClient
from offload.train.messages import GroupStatus, News, Orders, Push

TWO = BatchSplit(workers=2, local_batch_size=64, accum_steps=0)


def test_every_call_of_the_client_names_a_method_that_the_hub_answers() -> None:
    for name, method in inspect.getmembers(HubClient, inspect.isfunction):
        if not name.startswith("_"):
            asked, answered = inspect.signature(method), inspect.signature(getattr(Hub, name))
            # Ray adds a parameter of its own to the class, in place, once the process has created the actor.
            own = [parameter for parameter in answered.parameters if parameter != "_ray_trace_ctx"]
            assert list(asked.parameters) == own, name


def test_orders_that_arrive_behind_newer_ones_are_dropped() -> None:
    board = Board()
    board.publish(Orders(serial=2, workers=2))
    board.publish(Orders(serial=1, workers=1))
    assert board.begin_group(1).orders.workers == 2


def test_what_did_not_fit_into_memory_bounds_every_group_that_starts_later() -> None:
    board = Board()
    assert board.out_of_memory(1, TWO)
    board.publish(Orders(serial=1, split=TWO))
    assert board.begin_group(1).most_local == board.read(0).most_local == 32
    assert not board.out_of_memory(0, BatchSplit(workers=2, local_batch_size=1, accum_steps=0))


def steps_of(news: News) -> list[int]:
    return [event.step for event in news.events if isinstance(event, ReadyToResize)]


def test_events_are_kept_until_the_driver_has_read_them() -> None:
    board = Board()
    for number in (1, 2):
        board.note(ReadyToResize(step=number))
    first = board.read(0)
    assert steps_of(first) == [1, 2]
    assert board.read(0).events == first.events, "an answer may be lost"
    board.note(ReadyToResize(step=3))
    second = board.read(first.cursor)
    assert steps_of(second) == [3]
    assert len(board._events.waiting) == 1, "what the driver has is forgotten"
    assert board.read(second.cursor).events == ()
    board.note(ReadyToResize(step=4))
    assert steps_of(board.read(second.cursor)) == [4]


def test_a_group_of_which_a_worker_died_does_not_train_though_the_others_go_on_reporting() -> None:
    board = Board()
    alive = Push(rank=0, totals=Totals(), epoch=0, step=1, samples=0, group=GroupStatus(workers=2))
    for attempt in (1, 2):
        board.begin_group(attempt)
        board.push(alive)
        assert board.read(0).running
        board.worker_failed("died", ("a",), ("a",))
        board.push(alive)
        assert not board.read(0).running


def test_a_node_that_fails_repeatedly_is_told() -> None:
    board = Board()
    for attempt in (1, 2):
        assert board.read(0).failing == ()
        board.begin_group(attempt)
        board.worker_failed("died", ("bad",), ("bad",))
    assert board.read(0).failing == ("bad",)


def test_who_only_noticed_that_a_worker_died_is_asked_for_a_sign_of_life_and_not_blamed() -> None:
    board = Board()
    for attempt in (1, 2, 3):
        board.begin_group(attempt)
        board.worker_failed("connection closed by peer", (), ("noticed", "died"))
        assert set(board.read(0).suspects) == {"noticed", "died"}
    assert board.read(0).failing == ()


def test_after_several_failures_without_a_step_nobody_tries_again() -> None:
    board = Board()
    board.push(Push(rank=0, totals=Totals(), epoch=0, step=1, samples=0))
    assert [board.worker_failed("died", (), ()) for _ in range(4)] == [True, True, True, False]
    board.push(Push(rank=0, totals=Totals(), epoch=0, step=2, samples=0))
    assert board.worker_failed("died", (), ())


def test_the_driver_hears_at_once_that_a_worker_waits_for_it() -> None:
    board = Board()
    assert board.await_calls(0, 0.0) == 0
    heard: list[int] = []
    driver = threading.Thread(target=lambda: heard.append(board.await_calls(0, 60.0)))
    driver.start()
    board.call_driver()
    driver.join(300.0)
    assert heard == [1]
    assert board.await_calls(0, 60.0) == 1, "a call before the driver asked is not lost"
