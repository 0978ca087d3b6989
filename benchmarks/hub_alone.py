"""The feed of a run without Ray: what its own code spends on a block, by the numbers of cores and workers.

The pool's cores are objects that answer at once, and each worker has the two waiting calls of a real one. Blocks come one by one, two
milliseconds apart, so that workers wait for them, as where the input is the bottleneck. CPU time leaves out what other programs do.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

from offload.pipeline.feed import Feed
from offload.pipeline.passes import PassKey, PassRequest, Reach
from offload.pipeline.pool import Cost, Pool
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.pipeline.streams import Cores, Stream

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


def measured(cores: int, workers: int, blocks: int) -> dict[str, float]:
    """CPU time of the start and of each of ``blocks`` later blocks, their rows, and the fewest rows of a worker over the most."""
    under_way: queue.SimpleQueue[tuple[Future[Any], int]] = queue.SimpleQueue()

    class Alone(Pool):
        """The pool, on cores that answer at once."""

        def _new_actor(self, node: str, me: Any) -> Any:
            return _Actor(under_way)

    nodes = tuple(f"node-{core // CORES_PER_NODE}" for core in range(cores))
    recipe: Any = None
    samples = (blocks + FIRST_BLOCKS + 2 * cores) * 16 * LOCAL_BATCH
    stream = Stream(recipe=recipe, rows=list_torch_dataset(range(samples)).rows, shuffle=True)
    stores = dict.fromkeys(nodes, STORE_BYTES)
    feed = Feed({"train": stream}, Cores(nodes=nodes, task_cpus=1.0, stores=stores), pool=Alone)
    feed.begin(1)
    key = PassKey(attempt=1, name="train", number=0)
    request = PassRequest(world_size=workers, first_rows=LOCAL_BATCH * workers, epoch=0)
    rows = Counter[int]()

    def take(rank: int, reach: Reach) -> None:
        over = False
        while not over:
            pieces, over = feed.take(key, rank, 1, reach)
            rows[rank] += sum(piece.stop - piece.start for piece in pieces)

    def finish(count: int) -> None:
        for _ in range(count):
            done, size = under_way.get(timeout=60.0)
            spent_s = SAMPLE_S * size
            done.set_result(Cost(rows=size, size_bytes=SAMPLE_BYTES * size, cpu_s=spent_s, wall_s=spent_s))
            time.sleep(APART_S)

    began = time.process_time()
    threads = []
    for rank in range(workers):
        feed.open(key, request, rank, f"node-{rank // RANKS_PER_NODE}")
        reaches: tuple[Reach, Reach] = ("near", "far")
        threads += [threading.Thread(target=take, args=(rank, reach), daemon=True) for reach in reaches]
    for thread in threads:
        thread.start()
    finish(2 * cores + FIRST_BLOCKS)
    settled, taken = time.process_time(), rows.total()
    finish(blocks)
    ended = time.process_time()
    result = {
        "start_cpu_s": settled - began,
        "cpu_ms_per_block": (ended - settled) / blocks * 1e3,
        "rows_per_block": (rows.total() - taken) / blocks,
        "fewest_over_most_rows": min(rows[rank] for rank in range(workers)) / max(rows.values()),
    }
    for rank in range(workers):
        feed.leave(key, rank)
    for thread in threads:
        thread.join()
    return result
