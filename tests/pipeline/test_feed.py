"""What the feed hands out, to whom and how far ahead. The pool is the test: it takes tasks and says when they are done."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from offload.errors import RunError
from offload.pipeline.feed import passes, tasks
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.engine import HELD_SHARE
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, PassRequest, Slice
from offload.pipeline.pool.task import Assignment, Block, Cost, Task
from offload.pipeline.sources.from_torch import list_torch_dataset

SAMPLES, ROWS, ROW_BYTES = 640, 16, 10


class HandPool:
    """Starts nothing by itself."""

    def __init__(self, nodes: Any, task_cpus: float, work: Any, runtime_env: Any) -> None: ...

    def warm(self, recipe: Any) -> None: ...

    def look(self) -> None: ...

    def reshape(self, nodes: Any) -> threading.Event:
        return threading.Event()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Feed]:
    monkeypatch.setattr(tasks, "plan_tasks", lambda remaining, **_: [ROWS] * 4)
    monkeypatch.setattr(passes, "TAKE_TIMEOUT_S", 0.01)

    def made(store_bytes: float = 1e9, *, shuffle: bool = False, clock: Callable[[], float] = time.monotonic) -> Feed:
        table = list_torch_dataset([{"x": 0.0}] * SAMPLES).table
        recipe: Any = None
        streams = {n: FeedDataset(recipe=recipe, rows=table, shuffle=shuffle) for n in ("train", "val")}
        return Feed(
            streams,
            Cores(nodes=("a", "b"), task_cpus=1.0, stores={"a": store_bytes / 2, "b": store_bytes / 2}),
            pool=HandPool,
            clock=clock,
        )

    return made


def request(world_size: int = 1) -> PassRequest:
    return PassRequest(world_size=world_size, first_rows=ROWS, epoch=0)


def key(number: int = 0, name: str = "train") -> PassKey:
    return PassKey(attempt=1, name=name, number=number)


class Ref:
    """A reference to nothing, with a name."""

    def hex(self) -> str:
        return str(id(self))


def block(task: Task, node: str = "node") -> Block:
    rows = task.rows.num_rows
    cost = Cost(rows=rows, size_bytes=rows * ROW_BYTES, cpu_s=0.1, wall_s=0.1)
    return Block(ref=Ref(), cost=cost, node=node)  # type: ignore[arg-type]


def start(feed: Feed, node: str = "node") -> Assignment:
    assert feed.pool is not None
    assignment = feed.pool.next_task(node)
    assert assignment is not None
    return assignment


def finish(assignment: Assignment, node: str = "node") -> None:
    assignment.finished(block(assignment.task, node))


def work_all(feed: Feed) -> int:
    """Run tasks, each done at once, until there are none; returns how many."""
    count = 0
    while (found := feed.pool.next_task("node")) is not None:
        finish(found)
        count += 1
    return count


def rows_of(slices: list[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in slices)


def test_one_slow_task_does_not_let_the_others_fill_the_store(make: Callable[..., Feed]) -> None:
    blocks_in_store = 6
    feed = make(store_bytes=blocks_in_store * ROWS * ROW_BYTES / HELD_SHARE)
    feed.open(key(), request(), 0)
    slow = start(feed)
    assert work_all(feed) == blocks_in_store  # and then no more, though the worker has nothing to take
    assert feed.next_slices(key(), 0, 99) == ([], False)
    finish(slow)
    taken, over = feed.next_slices(key(), 0, 99)
    assert (rows_of(taken), over) == ((blocks_in_store + 1) * ROWS, False)
    assert work_all(feed) > 0  # there is room again


def test_a_node_whose_own_store_is_full_gets_no_more_tasks_while_others_do(make: Callable[..., Feed]) -> None:
    feed = make(store_bytes=10 * ROWS * ROW_BYTES / HELD_SHARE)
    feed.open(key(), request(), 0)
    full = 0
    held = [start(feed, "a")]  # under way, so that the worker is not starving for another
    while (found := feed.pool.next_task("b")) is not None:
        finish(found, "b")
        full += found.task.rows.num_rows
    assert 4 * ROWS < full <= 6 * ROWS
    held.append(start(feed, "a"))
    for begun in held:
        finish(begun, "a")
    feed.next_slices(key(), 0, 99)
    assert feed.pool.next_task("b") is not None


def test_a_rank_that_has_nothing_is_served_even_over_the_limit(make: Callable[..., Feed]) -> None:
    feed = make(store_bytes=1.0)
    feed.open(key(), request(2), 0)
    feed.open(key(), request(2), 1)
    received = 0
    while received < SAMPLES // 2:
        work_all(feed)
        slices, over = feed.next_slices(key(), 1, 1)  # rank 0 takes nothing: all the store is full of what is its
        assert slices, "rank 1 waits for ever"
        received += rows_of(slices)
    assert over or feed.next_slices(key(), 1, 1) == ([], True)


def test_a_validation_gets_several_cores_though_training_blocks_fill_the_store(make: Callable[..., Feed]) -> None:
    blocks_in_store = 30
    feed = make(store_bytes=blocks_in_store * ROWS * ROW_BYTES / HELD_SHARE)
    feed.open(key(), request(), 0)
    assert work_all(feed) == blocks_in_store
    feed.open(key(name="val"), request(), 0)
    under_way = [start(feed) for _ in range(3)]  # the worker waits for the first
    assert 0 < work_all(feed) <= blocks_in_store // 2
    for begun in under_way:
        finish(begun)
    while not (found := feed.next_slices(key(name="val"), 0, 99))[1]:
        assert found[0], "the worker waits for ever"
        work_all(feed)


def test_a_validation_comes_before_the_blocks_of_the_next_epoch(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.open(key(), PassRequest(world_size=1, first_rows=ROWS, epoch=1, followed=True), 0)
    while (begun := start(feed)).task.epoch == 1:
        finish(begun)
    assert begun.task.epoch == 2
    feed.open(key(name="val"), request(), 0)
    assert start(feed).task.epoch == 0


def test_blocks_that_nobody_takes_yet_get_no_room_beside_others(make: Callable[..., Feed]) -> None:
    feed = make(store_bytes=SAMPLES * ROW_BYTES / HELD_SHARE)
    feed.open(key(), PassRequest(world_size=1, first_rows=ROWS, epoch=0, followed=True), 0)
    assert work_all(feed) <= SAMPLES // ROWS + 1
    assert feed.held().total() <= (SAMPLES + ROWS) * ROW_BYTES


def test_a_rank_may_be_a_visit_behind(make: Callable[..., Feed]) -> None:
    feed = make()
    for rank in (0, 1):
        feed.open(key(0, "val"), request(2), rank)
    work_all(feed)
    assert rows_of(feed.next_slices(key(0, "val"), 0, 99)[0]) == SAMPLES // 2
    feed.leave(key(0, "val"), 0)
    feed.open(key(1, "val"), request(2), 0)
    assert rows_of(feed.next_slices(key(0, "val"), 1, 99)[0]) == SAMPLES // 2


def test_what_all_ranks_have_left_is_dropped_and_works_no_more(make: Callable[..., Feed]) -> None:
    feed = make()
    for rank in (0, 1):
        feed.open(key(), request(2), rank)
    start(feed)
    feed.leave(key(), 0)
    assert feed.pool.next_task("node") is not None
    feed.leave(key(), 1)
    assert feed.pool.next_task("node") is None
    assert feed.next_slices(key(), 0, 1) == ([], True)


def test_a_data_set_that_one_rank_alone_visits_does_not_pile_up(make: Callable[..., Feed]) -> None:
    feed = make()
    for visit in range(5):
        feed.open(key(visit, "val"), request(2), 0)
        work_all(feed)
        feed.next_slices(key(visit, "val"), 0, 99)
        feed.leave(key(visit, "val"), 0)
    assert len(feed._passes) <= 2


def test_a_pool_that_fails_is_told_to_who_waits(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.open(key(), request(), 0)
    feed.failed(RuntimeError("out of memory"))
    with pytest.raises(RunError, match="preprocessing failed: RuntimeError: out of memory"):
        feed.next_slices(key(), 0, 1)


def test_a_lost_block_is_made_again_for_the_rank_that_was_given_it(make: Callable[..., Feed]) -> None:
    feed = make()
    for rank in (0, 1):
        feed.open(key(), request(2), rank)
    work_all(feed)
    slices, over = feed.next_slices(key(), 1, 99)
    assert over
    gone = slices[3]
    feed.again(key(), 1, gone)
    assert feed.next_slices(key(), 1, 99) == ([], False)  # not over: one is still to come
    again = start(feed)
    assert again.task.rows.num_rows >= gone.stop
    finish(again)
    (piece,), over = feed.next_slices(key(), 1, 99)
    assert over
    assert piece._replace(ref=gone.ref) == gone
    assert piece.ref is not gone.ref
    feed.again(key(), 1, piece)  # and once more
    assert feed.pool.next_task("node") is not None


@pytest.mark.parametrize("total", [None, 2 * ROWS])
def test_what_comes_after_the_end_of_a_pass_that_nobody_wants_changes_nothing(total: int | None) -> None:
    """Otherwise, a validation that the program breaks off would take the pool's thread with it."""
    current = passes.Pass(key(), request(), total)
    task: Any = SimpleNamespace(rows=SimpleNamespace(num_rows=ROWS))
    current.put(0, block(task))
    current.close()
    current.put(1, block(task))
    current.end()
    assert current.next_slices(0, 9) == ([], True)
    assert current.held_bytes.total() == 0


# --- near and far -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_near_blocks_overtake_far_ones_only_where_the_order_is_random(make: Callable[..., Feed], shuffle: bool) -> None:
    feed = make(shuffle=shuffle)
    feed.open(key(), request(), 0, "a")
    far, near = start(feed, "b"), start(feed, "a")
    finish(near, "a")
    assert len(feed.next_slices(key(), 0, 9, "near")[0]) == shuffle
    finish(far, "b")
    assert len(feed.next_slices(key(), 0, 9, "near" if shuffle else "any")[0]) == (0 if shuffle else 2)
    assert len(feed.next_slices(key(), 0, 9, "far")[0]) == shuffle


def test_with_all_cores_on_the_workers_own_nodes_every_run_has_the_same_order(make: Callable[..., Feed]) -> None:
    feed = make(shuffle=True)
    for rank, node in enumerate("ab"):
        feed.open(key(), request(2), rank, node)
    one, other = start(feed, "b"), start(feed, "a")
    finish(other, "a")
    assert [feed.next_slices(key(), rank, 9) for rank in (0, 1)] == [([], False)] * 2
    finish(one, "b")
    assert [rows_of(feed.next_slices(key(), rank, 9)[0]) for rank in (0, 1)] == [ROWS, ROWS]


def test_ranks_get_blocks_of_their_own_nodes(make: Callable[..., Feed]) -> None:
    feed = make(shuffle=True)
    for rank, node in enumerate("ab"):
        feed.open(key(), request(2), rank, node)
    refs = {}
    for node in "baab":
        begun = start(feed, node)
        refs[node] = {*refs.get(node, set()), (made := block(begun.task, node)).ref}
        begun.finished(made)
    for rank, node in enumerate("ab"):
        assert {piece.ref for piece in feed.next_slices(key(), rank, 9, "near")[0]} == refs[node]


def test_a_far_node_with_more_than_its_link_carries_gets_no_more_tasks(make: Callable[..., Feed]) -> None:
    now = [0.0]
    feed = make(shuffle=True, clock=lambda: now[0])
    feed.open(key(), request(), 0, "a")
    for _ in range(5):  # the link carries a tenth of what a core makes: it takes 0.1 s for a block
        for node, reach in (("a", "near"), ("b", "far")):
            finish(start(feed, node), node)
            assert len(feed.next_slices(key(), 0, 9, reach)[0]) == 1
        now[0] += 1.0
    count = 0
    while (found := feed.pool.next_task("b")) is not None:  # type: ignore[union-attr]
        finish(found, "b")
        count += 1
    left = SAMPLES // ROWS - 10
    assert 0 < count < left / 4
    while (found := feed.pool.next_task("a")) is not None:  # type: ignore[union-attr]
        finish(found, "a")
        count += 1
    assert count == left, "the workers' own nodes make the rest"


def test_blocks_that_travel_count_until_they_have_arrived(make: Callable[..., Feed]) -> None:
    now = [0.0]
    feed = make(shuffle=True, clock=lambda: now[0])
    feed.open(key(), request(), 0, "a")
    for node in "ab":
        finish(start(feed, node), node)
    assert len(feed.next_slices(key(), 0, 9, "far")[0]) == 1
    assert feed.pool.next_task("b") is None, "nobody knows the link yet"  # type: ignore[union-attr]
    now[0] += 1.0
    feed.next_slices(key(), 0, 9, "far", arrived=0, timeout_s=0.0)
    assert feed.pool.next_task("b") is None  # type: ignore[union-attr]
    feed.arrived(key(), 0, "far", 1)
    feed.next_slices(key(), 0, 9, "far", arrived=0, timeout_s=0.0)  # a request from before
    assert feed.pool.next_task("b") is not None  # type: ignore[union-attr]


def test_while_workers_start_a_far_node_makes_no_more_than_its_first_blocks(make: Callable[..., Feed]) -> None:
    """Nobody knows its link: the rest of the epoch might wait for it."""
    feed = make(shuffle=True)
    feed.start_ahead(request(), "train", ["a"])
    for node in "ba":
        finish(start(feed, node), node)
    assert feed.pool.next_task("b") is None  # type: ignore[union-attr]
    assert feed.pool.next_task("a") is not None  # type: ignore[union-attr]
    feed.open(key(), request(), 0, "a")
    assert len(feed.next_slices(key(), 0, 9, "far")[0]) == 0, "made before the rank was known: it may be near"
    assert len(feed.next_slices(key(), 0, 9, "near")[0]) == 2
    assert feed.pool.next_task("b") is None, "it has not arrived"  # type: ignore[union-attr]
    feed.next_slices(key(), 0, 9, "near")
    assert feed.pool.next_task("b") is not None  # type: ignore[union-attr]


def test_a_first_pass_that_is_asked_for_once_the_group_has_begun_takes_nothing_from_the_groups_own(
    make: Callable[..., Feed],
) -> None:
    """Ray does not keep the order of calls. Nobody would take the blocks of a pass that belongs to no group."""
    feed = make()
    feed.begin(1)
    feed.start_ahead(request(), "train", ["a"])
    assert work_all(feed) == 0
    feed.open(key(), request(), 0)
    feed.start_ahead(request(), "train", ["a"])
    assert work_all(feed) == SAMPLES // ROWS


def test_a_core_of_a_node_that_has_left_may_still_ask(make: Callable[..., Feed]) -> None:
    feed = make(shuffle=True)
    feed.open(key(), request(), 0, "a")
    finish(start(feed, "a"), "a")
    feed.reshape(("a",), {"a": 1e9}, timeout_s=0.0)
    feed.pool.next_task("b")  # type: ignore[union-attr]
    assert feed.pool.next_task("a") is not None  # type: ignore[union-attr]


def test_a_change_of_the_cores_that_arrives_behind_a_newer_one_changes_nothing(make: Callable[..., Feed]) -> None:
    """Preprocessing would keep the cores that workers are about to take."""
    feed = make()
    feed.reshape(("a",), {"a": 1e9}, 0.0, 2)
    assert feed.reshape(("a", "b", "b"), {"a": 1e9, "b": 1e9}, 0.0, 1)
    assert feed.cores.nodes == ("a",)
    feed.reshape(("b", "b"), {"b": 1e9}, 0.0, 3)
    assert feed.cores.nodes == ("b", "b")


def test_a_rank_that_leaves_stops_waiting_at_once(make: Callable[..., Feed], monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make()
    monkeypatch.setattr(passes, "TAKE_TIMEOUT_S", 600.0)
    for rank in (0, 1):
        feed.open(key(), request(2), rank, "a")
    answers: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: answers.put(feed.next_slices(key(), 0, 1, "far")), daemon=True).start()
    feed.leave(key(), 0)
    assert answers.get(timeout=800) == ([], True)


def _block_comes(feed: Feed) -> Any:
    for _ in range(2):  # one of two ranks gets the first block
        finish(start(feed))
    return None


def _pass_ends(feed: Feed) -> Any:
    feed.next_slices(key(), 1, 99, timeout_s=0.0)
    work_all(feed)
    return None


def _preprocessing_fails(feed: Feed) -> Any:
    feed.failed(RunError("no cores"))
    return RunError


def _new_group_begins(feed: Feed) -> Any:
    feed.begin(2)
    return None


@pytest.mark.parametrize("happens", [_block_comes, _pass_ends, _preprocessing_fails, _new_group_begins])
def test_a_waiting_rank_hears_of_all_that_ends_its_wait(
    make: Callable[..., Feed], happens: Callable[[Feed], Any]
) -> None:
    feed = make()
    feed.begin(1)
    for rank in (0, 1):
        feed.open(key(), request(2), rank)
    answers: queue.Queue[Any] = queue.Queue()

    def take() -> None:
        try:
            answers.put(feed.next_slices(key(), 0, 1, timeout_s=600.0))
        except RunError as error:
            answers.put(type(error))

    threading.Thread(target=take, daemon=True).start()
    expected = happens(feed)
    answer = answers.get(timeout=800)
    assert answer == expected if expected else answer[0] or answer[1]


def test_a_rank_that_waits_for_a_lost_block_gets_it_when_it_is_made_again(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.open(key(), request(), 0)
    work_all(feed)
    slices, over = feed.next_slices(key(), 0, 999)
    assert over
    feed.again(key(), 0, slices[0])
    answers: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: answers.put(feed.next_slices(key(), 0, 1, timeout_s=600.0)), daemon=True).start()
    finish(start(feed))
    (again,), over = answers.get(timeout=800)
    assert over
    assert again[1:] == slices[0][1:]


def test_a_core_may_ask_once_more_when_preprocessing_was_withdrawn_from_all(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.open(key(), request(), 0)
    feed.reshape((), {}, 0.0)
    assert start(feed, "a").task.rows.num_rows == ROWS
