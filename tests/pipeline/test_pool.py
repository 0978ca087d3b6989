"""The pool's questions for tasks. Its cores are objects that do what the test says."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from offload.pipeline.pool.pool import IN_FLIGHT, Pool
from offload.pipeline.pool.task import Assignment, Block, Cost, Task
from tests.helpers import eventually

FAR = [f"far-{number}" for number in range(20)]


class Later:
    """A reference to a value that is still to come."""

    def __init__(self) -> None:
        self.value: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.value


class Core:
    """The actor of a core, and the handle of its methods. ``under_way`` gets its tasks."""

    def __init__(self, under_way: queue.SimpleQueue[Future[Any]]) -> None:
        self._under_way = under_way
        self.process, self.warm = self, Warm()

    def options(self, **_: Any) -> Core:
        return self

    def remote(self, *_: Any) -> tuple[object, Later]:
        cost = Later()
        self._under_way.put(cost.future())
        return object(), cost


class Warm:
    def remote(self, recipe: Any) -> Later:
        warmed = Later()
        warmed.future().set_result(None)
        return warmed


class Counted:
    """A task that counts its outcome."""

    def __init__(self, source: NearAlone) -> None:
        self._source = source
        recipe: Any = None
        self.task = Task(recipe=recipe, rows=None, epoch=0)

    def finished(self, block: Block) -> None:
        self._source.done += 1

    def failed(self, error: BaseException) -> None:
        self._source.done += 1


class NearAlone:
    """Tasks for one node alone. It counts the questions for each."""

    handle = None

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.done = 0

    def next_task(self, node: str) -> Assignment | None:
        self.asked[node] += 1
        return Counted(self) if node == "near" else None

    def failed(self, error: BaseException) -> None: ...
    def lost(self, node: str, error: BaseException) -> None: ...
    def works(self, node: str) -> None: ...


def test_a_finished_block_makes_the_pool_ask_for_its_own_node_alone() -> None:
    """On a large cluster, many nodes may have no room for more blocks: asking for each of them takes longer than the block."""
    under_way = queue.SimpleQueue[Future[Any]]()

    class ByHand(Pool):
        def _new_actor(self, node: str, me: Any) -> Any:
            return Core(under_way)

    work = NearAlone()
    pool = ByHand(["near", *FAR], 1.0, work, {})
    recipe: Any = None
    pool.warm(recipe)
    eventually(lambda: all(work.asked[node] for node in FAR))
    before = Counter(work.asked)
    for _ in range(50):  # each leads to the next task
        under_way.get(timeout=800).set_result(Cost(rows=1, size_bytes=1, cpu_s=1.0, wall_s=1.0))
    eventually(lambda: work.done == 50)
    eventually(lambda: work.asked["near"] >= before["near"] + 50)
    assert all(work.asked[node] == before[node] for node in FAR)
    pool.look()
    eventually(lambda: all(work.asked[node] > before[node] for node in FAR))


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError("memory on the node was 60GB / 62GB")],
    ids=["died", "memory"],
)
def test_a_process_that_ends_is_replaced_and_its_tasks_run_again(error: Exception) -> None:
    """Ray ends processes of a node whose memory is nearly full, with an error that is no actor's."""
    under_way = queue.SimpleQueue[Future[Any]]()
    processes: list[str] = []

    class ByHand(Pool):
        def _new_actor(self, node: str, me: Any) -> Any:
            processes.append(node)
            return Core(under_way)

    work = NearAlone()
    pool = ByHand(["near"], 1.0, work, {})
    recipe: Any = None
    pool.warm(recipe)
    for each in [under_way.get(timeout=800) for _ in range(IN_FLIGHT)]:
        each.set_exception(error)
    again = [under_way.get(timeout=800) for _ in range(IN_FLIGHT)]
    assert processes == ["near"] * 2
    assert work.done == 0
    for each in again:
        each.set_result(Cost(rows=1, size_bytes=1, cpu_s=1.0, wall_s=1.0))
    eventually(lambda: work.done == IN_FLIGHT)


def test_a_pool_that_shares_its_cores_works_on_until_others_take_over() -> None:
    under_way = queue.SimpleQueue[Future[Any]]()
    started: list[tuple[bool, Core]] = []
    killed: list[Any] = []
    begin = threading.Event()

    class Warming(Later):
        """A set-up that is done once the test says so."""

        def __init__(self) -> None:
            super().__init__()
            threading.Thread(target=self._warm, daemon=True).start()

        def _warm(self) -> None:
            begin.wait(800)
            self.value.set_result(None)

    class ByHand(Pool):
        def _new_actor(self, node: str, me: Any) -> Any:
            core = Core(under_way)
            if not self.reserves:
                core.warm = SimpleNamespace(remote=lambda recipe: Warming())  # type: ignore[assignment]
            started.append((self.reserves, core))
            return core

        def _kill(self, core: Any) -> None:
            killed.append(core.actor)

    pool = ByHand(["near", "near"], 1.0, NearAlone(), {})
    recipe: Any = None
    pool.warm(recipe)
    first = [under_way.get(timeout=800) for _ in range(2 * IN_FLIGHT)]
    assert pool.reserves
    assert pool.runs
    shared = pool.share()
    eventually(lambda: len(started) == 4)
    assert [reserves for reserves, _ in started] == [True, True, False, False]
    assert not killed
    assert not shared.is_set()
    begin.set()
    eventually(
        lambda: under_way.qsize() == 2 * IN_FLIGHT
    )  # the new processes have tasks, and the old ones still theirs
    assert not killed
    for each in first:
        each.set_result(Cost(rows=1, size_bytes=1, cpu_s=1.0, wall_s=1.0))
    assert shared.wait(800)
    assert {id(each) for each in killed} == {id(core) for _, core in started[:2]}
    assert pool.share().wait(800), "again: nothing to do"
    assert len(started) == 4
