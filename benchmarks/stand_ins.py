"""Stand-ins for a large cluster on one small machine: preprocessing cores whose work is sleep, and nodes that are only names.

The hub is the real one. ``Stood`` preprocessing cores are threads, many to a process; ``real`` ones have a process each, as in a run.
The cluster's clock may run slower than this machine's: a few real cores then have time for the calls of a thousand. Where it
stops: :mod:`benchmarks.hub_on_ray` says how many there are and what is measured.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from offload import machine
from offload.model.feeds import FeedRule
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed, FeedListener
from offload.pipeline.feed.passes import TAKE_TIMEOUT_S, Pass, PassKey, Reach, Slice
from offload.pipeline.feed.tasks import PassTasks
from offload.pipeline.index.rows import as_table
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.pool.pool import Pool
from offload.pipeline.pool.preprocessor import Preprocessor
from offload.pipeline.pool.processes import RayProcesses
from offload.pipeline.pool.task import Cost
from offload.train.hub.actor import Hub, collect_seldom, take_turns
from offload.train.hub.board import Board
from offload.train.hub.division import FeedTerms
from offload.train.hub.feeds import Feeds
from offload.train.hub.ray_feed import PROCESSES

SAMPLE_S = 0.025  # of a core, by the cluster's clock, like all times here
SPREAD = 0.1  # tasks of equal rows take this much longer or shorter
CORES_PER_NODE = 16


def node_names(cores: int) -> tuple[str, ...]:
    """The node of each core."""
    return tuple(f"node-{core // CORES_PER_NODE}" for core in range(cores))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The recipe of the stand-ins: samples of ``sample_bytes``, in a cluster where everything takes ``slower`` times as long."""

    sample_bytes: int
    slower: int

    def ready(self) -> Load:
        """It needs nothing."""
        return self

    def process(self, rows: Any, *, epoch: int, scratch: Any, watch: Any) -> Any:
        """Stand-ins do no work."""
        raise NotImplementedError


class Sleeper:
    """The work of a core: it sleeps, and remembers when."""

    def __init__(self) -> None:
        self._slept: list[tuple[float, float]] = []
        self._random = random.Random()
        self._began = math.inf  # of the present task

    def work(self, rows: Any, load: Load) -> tuple[Any, Cost]:
        """A block of these index rows, and a cost as if the sleep had been work of a core."""
        began = self._began = time.time()
        time.sleep(rows.num_rows * SAMPLE_S * load.slower * self._random.uniform(1 - SPREAD, 1 + SPREAD))
        ended = time.time()
        self._slept.append((began, ended))
        self._began = math.inf
        table = as_table(rows)
        positions = table.column(POSITION).to_numpy()
        content = np.zeros((len(positions), load.sample_bytes), np.uint8)
        block = wire.encode({"x": content, POSITION: positions, SAMPLE_ID: table.column(SAMPLE_ID).to_numpy()})
        seconds = (ended - began) / load.slower
        return block, Cost(rows=block.num_rows, size_bytes=block.nbytes, cpu_s=seconds, wall_s=seconds)

    def slept_s(self, since: float, until: float) -> float:
        """The seconds of work in this time."""
        slept = [*self._slept, (self._began, math.inf)]
        return sum(max(min(until, end) - max(since, begin), 0.0) for begin, end in slept)


class Stood:
    """A process that stands for some preprocessing cores. Each works on one task at a time."""

    def __init__(self) -> None:
        self._cores: defaultdict[int, Sleeper] = defaultdict(Sleeper)
        self._busy: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def warm(self, core: int, recipe: PackedRecipe) -> None:
        """See :class:`Preprocessor`."""
        recipe.ready()

    def process(self, core: int, rows: Any, recipe: PackedRecipe, epoch: int) -> tuple[Any, Cost]:
        """See :class:`Preprocessor`."""
        with self._busy[core]:
            return self._cores[core].work(rows, recipe.ready())

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core in this time."""
        return [core.slept_s(since, until) for core in list(self._cores.values())]


class RealProcess(Preprocessor):
    """The process of one core, as in a run, with sleep for work."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sleeper = Sleeper()

    def process(self, rows: Any, recipe: PackedRecipe, epoch: int) -> tuple[Any, Cost]:
        """See :class:`Preprocessor`."""
        return self._sleeper.work(rows, recipe.ready())

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core in this time."""
        return [self._sleeper.slept_s(since, until)]

    def memory_bytes(self) -> int:
        """The private memory of this process."""
        return machine.process_bytes()


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
        assert isinstance(self._processes, RayProcesses)
        self._processes.actor = ray.remote(RealProcess)
        return super()._new_actor(ray.get_runtime_context().get_node_id(), me)

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core in this time."""
        return [each for core in self._cores for each in ray.get(core.actor.slept_s.remote(since, until))]

    def memory_bytes(self) -> list[int]:
        """The private memory of each core's process."""
        found: list[int] = ray.get([core.actor.memory_bytes.remote() for core in self._cores])
        return found


class ScaleFeed(Feed):
    """A feed that also measures itself: the hub's own, with ``number`` 0, or one in an actor beside it. ``processes`` stand for its
    cores; without any, each core has a process. ``slower``: see :class:`Load`."""

    def __init__(
        self,
        streams: dict[str, FeedDataset],
        cores: Cores,
        hub: Any,
        processes: Sequence[Any],
        slower: int,
        number: int = 0,
        listener: FeedListener | None = None,
    ) -> None:
        take_turns()
        collect_seldom()
        StoodPool.processes = processes
        self._slower = slower
        super().__init__(
            streams,
            cores,
            pool=partial(StoodPool if processes else RealPool, first=number * PROCESSES),
            handle=hub,
            clock=lambda: time.monotonic() / slower,
            listener=listener,
        )

    def next_slices(
        self,
        key: PassKey,
        rank: int,
        want: int = 1,
        reach: Reach = "any",
        arrived: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[list[Slice], bool]:
        """See :class:`Feed`."""
        return super().next_slices(key, rank, want, reach, arrived, timeout_s or TAKE_TIMEOUT_S * self._slower)

    def usage(self) -> dict[str, float]:
        """See :func:`usage_of`."""
        return usage_of(self)


class ScaleHub(Hub):
    """The hub, whose feeds also measure themselves: see :class:`ScaleFeed`. ``homes``: the node of each rank; ``feeds``: among so many."""

    def __init__(
        self,
        streams: dict[str, FeedDataset],
        cores: Cores,
        processes: Sequence[Any],
        slower: int,
        homes: Sequence[str] = (),
        feeds: int = 1,
    ) -> None:
        self._slower, self._processes, self._streams = slower, processes, streams
        self._title = "hub"
        self._without_cache, self._through_ray = set[str](), set[str]()
        self._threads = 8 + 6 * len(homes)
        self._others: list[Any] = []
        self.board = Board(lambda: self.feeds.supply(), nodes=len(cores.by_node))
        hub = ray.get_runtime_context().current_actor
        self.feeds = Feeds(
            cores,
            FeedTerms(rule=FeedRule(least=feeds, most=feeds), homes=tuple(homes)),
            own=lambda share: ScaleFeed(streams, share, hub, processes, slower, listener=self),
            start=self._start_feed,
            end=self._end_feed,
        )

    def _start_feed(self, cores: Cores) -> Any:
        feed: Any = ray.remote(ScaleFeed)
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": dict(cores.runtime_env) or None}
        hub = ray.get_runtime_context().current_actor
        self._others.append(
            feed.options(**options, max_concurrency=self._threads, enable_task_events=False).remote(
                self._streams, cores, hub, self._processes, self._slower, len(self._others) + 1
            )
        )
        return self._others[-1]

    def next_slices(self, *asked: Any) -> tuple[list[Slice], bool]:
        """See :class:`ScaleFeed`."""
        return self.feed.next_slices(*asked)

    def usages(self) -> list[dict[str, float]]:
        """What each feed has used so far, the hub's own first."""
        asked = [feed.usage.remote() for feed in self._others]
        return [usage_of(self.feed), *ray.get(asked)]

    def slept_s(self, since: float, until: float) -> list[float]:
        """The seconds of work of each core with a process of its own."""
        return self._real().slept_s(since, until)

    def memory_bytes(self) -> list[int]:
        """The private memory of each core's process."""
        return self._real().memory_bytes()

    def _real(self) -> RealPool:
        assert self.feed.pool is not None
        pool = self.feed.pool._pool
        assert isinstance(pool, RealPool)
        return pool


def usage_of(feed: Feed) -> dict[str, float]:
    """CPU seconds and blocks of this process so far, and its memory now. ``python_cpu_s``: those of the threads that may hold Python's
    lock. Ray names them after the actor, and its own ones after what they do."""
    assert feed.pool is not None
    passes: list[tuple[Pass, PassTasks]] = list(feed.pool._passes.values())
    process = psutil.Process()
    times, memory = process.cpu_times(), process.memory_full_info()
    return {
        "at": time.time(),
        "cpu_s": times.user + times.system,
        "python_cpu_s": sum(
            thread.user_time + thread.system_time
            for thread in process.threads()
            if Path(f"/proc/self/task/{thread.id}/comm").read_text().startswith("ray::")
        ),
        "uss_mib": memory.uss / 2**20,
        "blocks": sum(tasks._issued - tasks._unfinished for _, tasks in passes),  # finished, of all open passes
        "rows": sum(current.delivered_rows for current, _ in passes),
    }
