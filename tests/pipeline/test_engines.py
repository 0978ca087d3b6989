"""One contract for all that makes blocks: the pool over an index, the pool over a Dataset's units, Ray Data, and a pool in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import ray.data

import offload
from offload.errors import RunError
from offload.pipeline.blocks import wire
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.engine import HELD_SHARE
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, PassRequest, Slice
from offload.pipeline.pool.pool import Pool
from offload.pipeline.pool.task import Block, Cost
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.watchdog import NoReports, Watch
from offload.pipeline.raydata.dataset_source import units_of
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.train.driver.listed import Listed
from tests.helpers import eventually

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

N, WIDTH = 300, 1000


class InMemory:
    """A pool that runs each task at once, in the thread that looks for work."""

    def __init__(self, nodes: Any, task_cpus: float, work: Any, runtime_env: Any) -> None:
        self._work, self._nodes, self._looking = work, nodes, threading.RLock()

    def warm(self, recipe: Any) -> None: ...

    def look(self) -> None:
        if not self._looking.acquire(blocking=False):
            return
        try:
            while (found := self._work.next_task(self._nodes[0])) is not None:
                task = found.task
                try:
                    recipe = task.recipe.ready()
                    table = recipe.process(task.rows, epoch=task.epoch, scratch=Scratch(), watch=Watch(NoReports()))
                except Exception as error:
                    found.failed(error)
                    continue
                cost = Cost(rows=table.num_rows, size_bytes=table.nbytes, cpu_s=0.01, wall_s=0.01)
                found.finished(Block(ref=ray.put(table), cost=cost, node=self._nodes[0]))
        finally:
            self._looking.release()

    def reshape(self, nodes: Any) -> threading.Event:
        self._nodes = nodes
        left = threading.Event()
        left.set()
        return left

    def starting(self) -> int:
        return 0


class Wide(list[Any]):
    """Samples of some size, so that blocks fill a store."""

    def __init__(self) -> None:
        super().__init__(range(N))

    def __getitem__(self, i: Any) -> Any:
        return {"id": i, "x": np.full(WIDTH, i, np.float32)}


def widened(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "x": np.repeat(batch["id"][:, None], WIDTH, 1).astype(np.float32)}


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no such colour")


def of_index(transform: Any) -> Listed:
    pipeline = offload.from_torch(Wide(), transform)
    return Listed(name="train", pipeline=pipeline, index=list_torch_dataset(Wide()), shuffle=True)


def of_units(transform: Any) -> Listed:
    dataset = ray.data.range(N, override_num_blocks=10).map_batches(widened)
    units: Any = units_of(dataset)
    return Listed(name="train", pipeline=offload.from_ray(dataset, transform), index=None, units=units, shuffle=True)


def of_ray_data(transform: Any) -> Listed:
    dataset = ray.data.range(N, override_num_blocks=3).random_shuffle().map_batches(widened)
    dataset.context.enable_progress_bars = False
    pipeline = offload.from_ray(dataset, transform, id_column="id")
    return Listed(name="train", pipeline=pipeline, index=None, shuffle=False)


ENGINES: dict[str, tuple[Callable[[Any], Listed], Any]] = {
    "pool, index": (of_index, Pool),
    "pool, units": (of_units, Pool),
    "in memory, index": (of_index, InMemory),
    "in memory, units": (of_units, InMemory),
    "Ray Data": (of_ray_data, Pool),
}


# Every run is a pool, over an index or over a Dataset's units: tests/train has them. Here the pool in memory shows what each does.
OFTEN = ("pool, index", "pool, units")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] if name in OFTEN else []) for name in ENGINES])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Feed]]:
    build, pool = ENGINES[request.param]
    made: list[Feed] = []

    def feed(transform: Any = None, store_bytes: float = 1e9) -> Feed:
        node = ray.get_runtime_context().get_node_id()
        cores = Cores(nodes=(node, node), task_cpus=1.0, stores={node: store_bytes})
        stream: FeedDataset = build(transform).stream(seed=1, put=ray.put)
        made.append(Feed({"train": stream}, cores, pool=pool))
        return made[0]

    yield feed
    for each in made:
        for key in list(each._passes):
            each.leave(key, 0)
        each.reshape((), {}, 60.0)


def request(world_size: int = 1, **options: Any) -> PassRequest:
    return PassRequest(world_size=world_size, first_rows=16, epoch=0, **options)


KEY = PassKey(attempt=1, name="train", number=0)


def taken(feed: Feed, rank: int = 0, key: PassKey = KEY) -> list[Slice]:
    found: list[Slice] = []
    while True:
        pieces, over = feed.next_slices(key, rank, want=4)
        found += pieces
        if over:
            return found


def rows(pieces: list[Slice]) -> list[tuple[int, float]]:
    found = []
    for piece in pieces:
        columns = wire.decode(ray.get(piece.ref).slice(piece.start, piece.stop - piece.start))
        found += list(zip(np.asarray(columns["id"]).tolist(), np.asarray(columns["x"])[:, -1].tolist(), strict=True))
    return found


def test_a_pass_delivers_each_sample_once_and_ends(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.begin(1)
    feed.open(KEY, request(), 0)
    assert sorted(rows(taken(feed))) == [(i, float(i)) for i in range(N)]
    assert feed.rates()["train"]["wire_bytes_per_sample"] > 4 * WIDTH


def test_ranks_share_a_pass_equally(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.begin(1)
    found: list[list[tuple[int, float]]] = [[], []]
    for rank in (0, 1):
        feed.open(KEY, request(2), rank)
    threads = [threading.Thread(target=lambda k=k: found[k].extend(rows(taken(feed, k)))) for k in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [len(each) for each in found] == [N // 2, N // 2]
    assert sorted(found[0] + found[1]) == [(i, float(i)) for i in range(N)]


def test_an_error_of_the_user_s_code_reaches_whoever_waits(make: Callable[..., Feed]) -> None:
    feed = make(failing)
    feed.begin(1)
    feed.open(KEY, request(), 0)
    with pytest.raises(RunError, match="failing raised ValueError: no such colour"):
        taken(feed)


def test_what_nobody_takes_fills_only_its_share_of_the_store(make: Callable[..., Feed]) -> None:
    store = 4.0 * WIDTH * N / 2 / HELD_SHARE  # half of the samples fit
    feed = make(store_bytes=store)
    feed.begin(1)
    feed.open(KEY, request(), 0)
    first, over = feed.next_slices(KEY, 0)
    while not first and not over:
        first, over = feed.next_slices(KEY, 0)
    eventually(lambda: feed.held().total() > 0 or len(first) > 1)
    assert feed.held().total() < 4.0 * WIDTH * N
    assert sorted(rows(first + taken(feed))) == [(i, float(i)) for i in range(N)]


def test_the_rest_of_a_pass(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.begin(1)
    feed.open(KEY, request(), 0)
    begun = taken(feed)[:2]
    positions = np.concatenate(
        [np.asarray(wire.decode(ray.get(p.ref))[wire.POSITION])[p.start : p.stop] for p in begun]
    )
    feed.leave(KEY, 0)
    done = offload.pipeline.order.ranges.Ranges.of(positions).pairs
    again = PassKey(attempt=1, name="train", number=1)
    feed.open(again, request(done=done), 0)
    assert sorted(rows(begun) + rows(taken(feed, key=again))) == [(i, float(i)) for i in range(N)]


def test_a_lost_slice_comes_again_or_ends_the_run(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.begin(1)
    feed.open(KEY, request(), 0)
    pieces, _ = feed.next_slices(KEY, 0)
    while not pieces:
        pieces, _ = feed.next_slices(KEY, 0)
    feed.again(KEY, 0, pieces[0])
    if not feed.streams["train"].pooled:
        with pytest.raises(RunError, match="a node was lost with blocks"):
            taken(feed)
        return
    rest = taken(feed)
    (new,) = [piece for piece in rest if piece[1:] == pieces[0][1:]]
    assert new.ref != pieces[0].ref
    assert sorted(rows(rest + pieces[1:])) == [(i, float(i)) for i in range(N)]


def test_cores_come_and_go(make: Callable[..., Feed]) -> None:
    feed = make()
    feed.begin(1)
    feed.open(KEY, request(), 0)
    node = ray.get_runtime_context().get_node_id()
    assert feed.reshape((node,), {node: 1e9}, 300.0)
    assert feed.core_counts()[0] == 1
    assert sorted(rows(taken(feed))) == [(i, float(i)) for i in range(N)]
