"""The preprocessing pool: one actor per core, fed two tasks deep, so that a core goes from one task to the next.

Why not a Ray Data execution per epoch: its scheduler looks at finished tasks ten times a second, so that a core idles
0.15 s between two tasks, spends 10 to 20 ms of CPU on each, and starts its processes anew (5 to 10 s of imports per core)
whenever they were idle for a second or an epoch ends. Here a task costs about a millisecond, may be short, and a
transform is set up once per core and run. ``ray.data.Dataset`` sources still run as Ray Data pipelines
(:mod:`offload.pipeline.ray_data`).

Where it stops: it runs the tasks it is given and tells what they cost. Which rows, and how many, is decided in
:mod:`offload.pipeline.feed`.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.pipeline import stage as stages
from offload.pipeline.gather import Scratch
from offload.pipeline.malloc import keep_freed_memory
from offload.pipeline.stage import Stage

IN_FLIGHT = 2  # tasks per actor: the one that runs, and the next
AT_ONCE_S = 0.25  # between two tasks: longer, and the core was idle or set something up
RESTARTS = 3  # of one actor, should its process or its node die; its tasks are then run again


@dataclass(frozen=True, kw_only=True)
class PackedStage:
    """A stage in the object store, with the key under which a process keeps it unpickled."""

    key: str
    ref: ray.ObjectRef[np.ndarray[Any, Any]]

    @classmethod
    def of(cls, stage: Stage) -> PackedStage:
        packed = stages.pack(stage)
        return cls(key=hashlib.blake2b(packed.tobytes(), digest_size=16).hexdigest(), ref=ray.put(packed))

    def ready(self) -> Stage:
        """The stage, unpickled once per process."""
        return stages.unpack(self.key, lambda: ray.get(self.ref))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a task made, and what it cost its core, imports and set-up apart. ``cpu_s`` counts from the end of the task before
    it, where it followed at once."""

    rows: int
    size_bytes: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Block:
    """A finished block: where it is, and what it cost."""

    ref: ray.ObjectRef[pa.Table]
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Task:
    """Index rows to be processed by a stage, for an epoch."""

    stage: PackedStage
    rows: pa.Table
    epoch: int


class Preprocessor:
    """The actor: one core."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._scratch = Scratch()  # a block that process() returned is in the object store before the next call begins
        self._ended: tuple[float, float] | None = None

    def warm(self, stage: PackedStage) -> None:
        """Import and set up what the stage needs, before there is work."""
        stage.ready()

    def process(self, rows: pa.Table, stage: PackedStage, epoch: int) -> tuple[pa.Table, Cost]:
        """The block of these rows, and its cost."""
        ready = stage.ready()
        cpu, wall = time.process_time(), time.perf_counter()
        since = cpu
        if self._ended is not None and wall - self._ended[1] < AT_ONCE_S:
            since = self._ended[0]  # the last block's way into the object store is part of the price
        block = stages.process(ready, rows, epoch=epoch, scratch=self._scratch)
        self._ended = time.process_time(), time.perf_counter()
        cost = Cost(
            rows=block.num_rows, size_bytes=block.nbytes, cpu_s=self._ended[0] - since, wall_s=self._ended[1] - wall
        )
        return block, cost


Done = Callable[[Block | BaseException], None]


class Work(Protocol):
    """Where the pool gets its tasks."""

    def next_task(self) -> tuple[Task, Done] | None:
        """The next task and what to call with its outcome; None if there is none at present."""

    def failed(self, error: BaseException) -> None:
        """Preprocessing cannot go on."""


class Pool:
    """An actor per core, and the thread that feeds them with what ``work`` has.

    ``nodes``: per core the node to run on. They are told apart, not spread as Ray likes: where Ray put one too many, the
    worker that is to start there would wait for its CPU without an end.
    """

    def __init__(self, nodes: Sequence[str], task_cpus: float, work: Work) -> None:
        actor: Any = ray.remote(Preprocessor)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=task_cpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
                max_restarts=RESTARTS,
                max_task_retries=RESTARTS,
            ).remote()
            for node in nodes
        ]
        self._work = work
        # Tasks in flight, of the actors that run: one that has no room yet must not keep a block that others wait for.
        self._load: dict[int, int] = {}
        self._lost: set[int] = set()
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="pool").start()

    def warm(self, stage: PackedStage) -> None:
        """Let every core import and set up a stage now."""
        for at, actor in enumerate(self._actors):
            warmed: Future[None] = actor.warm.remote(stage).future()
            warmed.add_done_callback(lambda made, at=at: self._news.put(lambda: self._joined(at, made)))  # type: ignore[misc]

    def look(self) -> None:
        """There may be work that there was not before."""
        self._news.put(None)

    def _run(self) -> None:
        try:
            while True:
                while self._idle() and (found := self._work.next_task()) is not None:
                    self._start(*found)
                if (news := self._news.get()) is not None:
                    news()
        except BaseException as error:  # whoever waits for blocks would do so forever
            self._work.failed(error)
            raise

    def _idle(self) -> bool:
        return bool(self._load) and min(self._load.values()) < IN_FLIGHT

    def _joined(self, at: int, warmed: Future[None]) -> None:
        error = warmed.exception()
        if not isinstance(error, ray.exceptions.RayActorError):
            # A transform that cannot be set up raises here, and again in the first task, which tells the user.
            self._load.setdefault(at, 0)
            return
        self._lost.add(at)
        if len(self._lost) == len(self._actors):
            self._work.failed(error)

    def _start(self, task: Task, done: Done) -> None:
        at = min(self._load, key=self._load.__getitem__)
        self._load[at] += 1
        ref, cost = self._actors[at].process.options(num_returns=2).remote(task.rows, task.stage, task.epoch)
        # Not ray.wait in a loop: that wakes ten times a second for nothing, on a core that has samples to make.
        cost.future().add_done_callback(lambda made: self._news.put(lambda: self._finished(at, ref, made, done)))

    def _finished(self, at: int, ref: Any, cost: Future[Cost], done: Done) -> None:
        self._load[at] -= 1
        error = cost.exception()
        done(Block(ref=ref, cost=cost.result()) if error is None else error)
