"""The feed of a run without Ray: what its own code spends on a block, by the numbers of cores and workers.

The pool's cores are objects that answer at once, and each worker has the two waiting calls of a real one. CPU time leaves out what other
programs do. Where the input is the bottleneck, blocks come one by one, two milliseconds apart, and workers wait for them. Where the workers
are, they take one every two milliseconds, and all cores wait for room.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.engine import HELD_SHARE
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, PassRequest, Reach
from offload.pipeline.pool.pool import Pool
from offload.pipeline.pool.task import Cost
from offload.pipeline.sources.from_torch import list_torch_dataset

SAMPLE_S, SAMPLE_BYTES = 0.025, 150_000
LOCAL_BATCH = 32
CORES_PER_NODE, RANKS_PER_NODE = 16, 8
STORE_BYTES = 9e9  # of each node
APART_S = 0.002
FIRST_BLOCKS = 200  # after those of the start, two for each core


class _Ref:
    """A reference to nothing, with a name."""

    _names = itertools.count()

    def __init__(self) -> None:
        self._name = str(next(self._names))

    def hex(self) -> str:
        return self._name


class _Later:
    """A reference to a value that is still to come."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self._future


class _Actor:
    """A core. ``under_way`` gets its tasks. It is its own methods' handle, too."""

    def __init__(self, under_way: queue.SimpleQueue[tuple[Future[Any], int]]) -> None:
        self._under_way = under_way
        self.process = self
        self.warm = _Warm()

    def options(self, **_: Any) -> _Actor:
        return self

    def remote(self, rows: Any, recipe: Any, epoch: int) -> tuple[_Ref, _Later]:
        cost = _Later()
        self._under_way.put((cost.future(), rows.num_rows))
        return _Ref(), cost


class _Warm:
    def remote(self, recipe: Any) -> _Later:
        warmed = _Later()
        warmed.future().set_result(None)
        return warmed


def measured(cores: int, workers: int, blocks: int, *, full: bool) -> dict[str, float]:
    """CPU time of the start and of each of ``blocks`` later blocks, their rows, and the fewest rows of a worker over the most.
    ``full``: the workers are the bottleneck."""
    under_way: queue.SimpleQueue[tuple[Future[Any], int]] = queue.SimpleQueue()
    nodes = tuple(f"node-{core // CORES_PER_NODE}" for core in range(cores))
    feed = _feed(nodes, blocks, under_way)
    key = PassKey(attempt=1, name="train", number=0)
    rows, tokens, ended = Counter[int](), threading.Semaphore(0), threading.Event()

    def take(rank: int, reach: Reach) -> None:
        over = False
        while not over:
            if full:
                tokens.acquire()
            pieces, over = feed.next_slices(key, rank, 1, reach)
            rows[rank] += sum(piece.stop - piece.start for piece in pieces)

    def finish() -> None:
        done, size = under_way.get(timeout=60.0)
        spent_s = SAMPLE_S * size
        done.set_result(Cost(rows=size, size_bytes=SAMPLE_BYTES * size, cpu_s=spent_s, wall_s=spent_s))

    def finish_all() -> None:
        while not ended.is_set():
            with contextlib.suppress(queue.Empty):
                finish()

    def pass_on(count: int) -> None:
        for _ in range(count):
            if full:
                tokens.release()
            else:
                finish()
            time.sleep(APART_S)

    began = time.process_time()
    request = PassRequest(world_size=workers, first_rows=LOCAL_BATCH * workers, epoch=0)
    threads = []
    for rank in range(workers):
        feed.open(key, request, rank, f"node-{rank // RANKS_PER_NODE}")
        reaches: tuple[Reach, ...] = ("any",) if full else ("near", "far")
        threads += [threading.Thread(target=take, args=(rank, reach), daemon=True) for reach in reaches]
    if full:
        threads.append(threading.Thread(target=finish_all, daemon=True))
    for thread in threads:
        thread.start()
    pass_on(2 * cores + FIRST_BLOCKS)
    if full:
        _wait_until_full(feed)
    settled, taken, held = time.process_time(), rows.total(), feed.held().total()
    pass_on(blocks)
    stopped = time.process_time()
    result = {
        "start_cpu_s": settled - began,
        "cpu_ms_per_block": (stopped - settled) / blocks * 1e3,
        "rows_per_block": (rows.total() - taken) / blocks,
        "fewest_over_most_rows": min(rows[rank] for rank in range(workers)) / max(rows.values()),
    }
    if full:
        result["held_over_held_before"] = feed.held().total() / held
    ended.set()
    for rank in range(workers):
        feed.leave(key, rank)
    tokens.release(2 * workers)
    return result


def _feed(nodes: tuple[str, ...], blocks: int, under_way: queue.SimpleQueue[tuple[Future[Any], int]]) -> Feed:
    """A feed with more samples than are made."""

    class Alone(Pool):
        """The pool, on cores that answer at once."""

        def _new_actor(self, node: str, me: Any) -> Any:
            return _Actor(under_way)

    recipe: Any = None
    stores = dict.fromkeys(nodes, STORE_BYTES)
    held = HELD_SHARE * len(stores) * STORE_BYTES / SAMPLE_BYTES
    samples = (blocks + FIRST_BLOCKS + 2 * len(nodes)) * 16 * LOCAL_BATCH + round(held)
    stream = FeedDataset(recipe=recipe, rows=list_torch_dataset(range(samples)).rows, shuffle=True)
    feed = Feed({"train": stream}, Cores(nodes=nodes, task_cpus=1.0, stores=stores), pool=Alone)
    feed.begin(1)
    return feed


def _wait_until_full(feed: Feed) -> None:
    held = -1
    while held != (held := feed.held().total()):
        time.sleep(1.0)
