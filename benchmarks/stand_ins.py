"""Stand-ins for a large cluster on one small machine: preprocessing cores whose work is sleep, nodes that are only names, and ranks
that count.

The hub is the real one. ``Stood`` preprocessing cores are threads, many to a process; ``real`` ones have a process each, as in a run.
Where it stops: :mod:`benchmarks.hub_on_ray` says how many there are and what is measured.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import ray

from offload.measure.steps import Totals
from offload.pipeline import wire
from offload.pipeline.feed import Feed
from offload.pipeline.index_rows import as_table
from offload.pipeline.passes import PassKey, PassRequest
from offload.pipeline.pool import Cost, PackedRecipe, Pool, Preprocessor
from offload.pipeline.streams import Cores, Stream
from offload.pipeline.wire import POSITION, SAMPLE_ID
from offload.train.hub.actor import Hub
from offload.train.hub.board import Board
from offload.train.hub.client import HubClient
from offload.train.messages import GroupStatus, Push
from offload.train.worker.feed_client import HubFeed
from offload.train.worker.fetching import Fetcher

SAMPLE_S = 0.025  # of a core
BLOCK_BYTES = 128 << 10  # too large to travel inside of messages, and small: one machine copies the blocks of all cores
SPREAD = 0.1  # tasks of equal rows take this much longer or shorter
CORES_PER_NODE, RANKS_PER_NODE = 16, 8
PUSH_S = 2.0


def node_names(cores: int) -> tuple[str, ...]:
    """The node of each core."""
    return tuple(f"node-{core // CORES_PER_NODE}" for core in range(cores))


class Sleeper:
    """The work of a core: it sleeps, and remembers when."""

    def __init__(self) -> None:
        self._slept: list[tuple[float, float]] = []
        self._random = random.Random()

    def work(self, rows: Any) -> tuple[Any, Cost]:
        """A block of these index rows, and a cost as if the sleep had been work of a core."""
        began = time.time()
        time.sleep(rows.num_rows * SAMPLE_S * self._random.uniform(1 - SPREAD, 1 + SPREAD))
        ended = time.time()
        self._slept.append((began, ended))
        table = as_table(rows)
        positions = table.column(POSITION).to_numpy()
        content = np.zeros((len(positions), BLOCK_BYTES // max(len(positions), 1)), np.uint8)
        block = wire.encode({"x": content, POSITION: positions, SAMPLE_ID: table.column(SAMPLE_ID).to_numpy()})
        return block, Cost(rows=block.num_rows, size_bytes=block.nbytes, cpu_s=ended - began, wall_s=ended - began)

    def slept_s(self, since: float, until: float) -> float:
        """The seconds of work in this time."""
        return sum(max(min(until, end) - max(since, begin), 0.0) for begin, end in list(self._slept))


class Stood:
    """A process that stands for some preprocessing cores. Each works on one task at a time."""

    def __init__(self) -> None:
        self._cores: defaultdict[int, Sleeper] = defaultdict(Sleeper)
        self._busy: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def warm(self, core: int, recipe: PackedRecipe) -> None:
        """See :class:`Preprocessor`."""

    def process(self, core: int, rows: Any, recipe: PackedRecipe, epoch: int) -> tuple[Any, Cost]:
        """See :class:`Preprocessor`."""
        with self._busy[core]:
            return self._cores[core].work(rows)

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core in this time."""
        return [core.slept_s(since, until) for core in list(self._cores.values())]


class RealProcess(Preprocessor):
    """The process of one core, as in a run, with sleep for work."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sleeper = Sleeper()

    def warm(self, recipe: PackedRecipe) -> None:
        """No data set needs a set-up."""

    def process(self, rows: Any, recipe: PackedRecipe, epoch: int) -> tuple[Any, Cost]:
        """See :class:`Preprocessor`."""
        return self._sleeper.work(rows)

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core in this time."""
        return [self._sleeper.slept_s(since, until)]


class _Method:
    """A method of a stood-for core: a call of the process that stands for it."""

    def __init__(self, method: Any, core: int) -> None:
        self._method, self._core = method, core

    def options(self, **options: Any) -> _Method:
        return _Method(self._method.options(**options), self._core)

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._core, *arguments)


class _Handle:
    """The handle of a stood-for core."""

    def __init__(self, process: Any, core: int) -> None:
        self.warm, self.process = _Method(process.warm, core), _Method(process.process, core)


class StoodPool(Pool):
    """The pool, with stood-for cores. ``processes`` stand for them."""

    processes: Sequence[Any] = ()

    def _new_actor(self, node: str, me: Any) -> Any:
        return _Handle(self.processes[me.number % len(self.processes)], me.number)

    def _kill(self, core: Any) -> None:
        """A stood-for core has no process to end."""


class RealPool(Pool):
    """The pool, with a process for each core, all on this machine."""

    def _new_actor(self, node: str, me: Any) -> Any:
        self._actor = ray.remote(RealProcess)
        return super()._new_actor(ray.get_runtime_context().get_node_id(), me)

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core in this time."""
        return [each for core in self._cores for each in ray.get(core.actor.slept_s.remote(since, until))]


class ScaleHub(Hub):
    """The hub, which also measures itself. ``processes`` stand for its cores; without any, each core has a process."""

    def __init__(self, streams: dict[str, Stream], cores: Cores, processes: Sequence[Any]) -> None:
        StoodPool.processes = processes
        self.made: list[Any] = []
        self._without_cache = set[str]()

        def pool(*arguments: Any) -> Pool:
            self.made.append((StoodPool if processes else RealPool)(*arguments))
            made: Pool = self.made[0]
            return made

        nodes = len(cores.by_node)
        Board.__init__(self, self.rates, self.core_counts, self.speeds, self.process_bytes, self.spent, nodes=nodes)
        Feed.__init__(self, streams, cores, pool=pool, handle=ray.get_runtime_context().current_actor)

    def usage(self) -> dict[str, float]:
        """CPU seconds and blocks of this process so far, and its memory now."""
        process = psutil.Process()
        times, memory = process.cpu_times(), process.memory_full_info()
        return {
            "at": time.time(),
            "cpu_s": times.user + times.system,
            "uss_mib": memory.uss / 2**20,
            "blocks": self._blocks(),
        }

    def _blocks(self) -> int:
        """The finished blocks of all open passes."""
        assert self.pool is not None
        return sum(tasks._issued - tasks._unfinished for _, tasks in list(self.pool._passes.values()))

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core with a process of its own."""
        found: list[float] = self.made[0].slept_s(since, until)
        return found


class Ranks:
    """A process that stands for the workers of one node: each fetches like a worker, and counts."""

    def __init__(self, hub: Any, ranks: Sequence[int], world_size: int, node: str) -> None:
        self._hub, self._node = HubClient(hub), node
        self._ranks, self._world_size = ranks, world_size
        self._rows: dict[int, int] = dict.fromkeys(ranks, 0)
        self._first: dict[int, float] = {}
        self._positions: list[Any] = []
        self._pieces = 0
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def begin(self, key: PassKey, request: PassRequest) -> None:
        """Take the rows of a pass from now on."""
        self._rows, self._first, self._positions = dict.fromkeys(self._ranks, 0), {}, []
        self._pieces = 0
        self._ended.clear()
        self._threads = [
            threading.Thread(target=self._take, args=(key, request, rank), daemon=True) for rank in self._ranks
        ]
        self._threads += [threading.Thread(target=self._push, args=(rank,), daemon=True) for rank in self._ranks]
        for thread in self._threads:
            thread.start()

    def counts(self) -> tuple[dict[int, int], dict[int, float], int]:
        """The rows of each rank so far, when its first ones came, and the number of all pieces. Raises the error of a rank."""
        if self._error is not None:
            raise self._error
        return dict(self._rows), dict(self._first), self._pieces

    def join(self) -> Any:
        """Wait for the end of the pass. Return the positions of all rows."""
        for thread in self._threads[: len(self._ranks)]:
            thread.join()
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return np.concatenate(self._positions) if self._positions else np.zeros(0, np.int64)

    def leave(self) -> None:
        """Take no more of the pass."""
        self._ended.set()

    def _take(self, key: PassKey, request: PassRequest, rank: int) -> None:
        try:
            self._take_all(key, request, rank)
        except BaseException as error:  # nobody else would hear of it
            self._error = error

    def _take_all(self, key: PassKey, request: PassRequest, rank: int) -> None:
        self._hub.open(key, request, rank, self._node)
        feed = HubFeed(self._hub)
        fetcher = Fetcher(feed, key, rank, ordered=False)
        while not self._ended.is_set():
            with contextlib.suppress(queue.Empty):
                piece = fetcher.get(1.0)
                if piece is None:
                    break
                self._first.setdefault(rank, time.time())
                self._rows[rank] += piece[1]
                self._pieces += 1
                self._positions.append(piece[0][POSITION].copy())
        fetcher.close()
        feed.leave(key, rank)

    def _push(self, rank: int) -> None:
        group = GroupStatus(workers=self._world_size)
        while not self._ended.wait(PUSH_S):
            rows = self._rows[rank]
            totals = Totals(steps=self._pieces, samples=rows)
            self._hub.push(Push(rank=rank, totals=totals, epoch=0, step=1, samples=rows, node=self._node, group=group))
