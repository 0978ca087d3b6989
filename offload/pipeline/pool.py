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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray

from offload.pipeline import stage as stages
from offload.pipeline.gather import Scratch
from offload.pipeline.malloc import keep_freed_memory
from offload.pipeline.stage import Stage

IN_FLIGHT = 2  # tasks per actor: the one that runs, and the next
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
    """What a task made, and what it cost its core, imports and set-up apart."""

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

    def warm(self, stage: PackedStage) -> None:
        """Import and set up what the stage needs, before there is work."""
        stage.ready()

    def process(self, rows: pa.Table, stage: PackedStage, epoch: int) -> tuple[pa.Table, Cost]:
        """The block of these rows, and its cost."""
        ready = stage.ready()
        cpu, wall = time.process_time(), time.perf_counter()
        block = stages.process(ready, rows, epoch=epoch, scratch=self._scratch)
        cost = Cost(
            rows=block.num_rows,
            size_bytes=block.nbytes,
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
        )
        return block, cost


Done = Callable[[Block | BaseException], None]


class Work(Protocol):
    """Where the pool gets its tasks."""

    def next_task(self) -> tuple[Task, Done] | None:
        """The next task and what to call with its outcome; None if there is none at present."""


class Pool:
    """``cores`` actors, and the thread that feeds them with what ``work`` has."""

    def __init__(self, cores: int, task_cpus: float, work: Work) -> None:
        # Spread, so that every node's cores are used from the first task on.
        actor: Any = ray.remote(Preprocessor).options(
            num_cpus=task_cpus, scheduling_strategy="SPREAD", max_restarts=RESTARTS, max_task_retries=RESTARTS
        )
        self._actors: list[Any] = [actor.remote() for _ in range(cores)]
        self._work = work
        self._load = [0] * cores
        # What the thread is woken with: a finished task (its actor, its block, what it cost, whom to tell), or None:
        # there may be work that there was not before.
        self._news: queue.SimpleQueue[tuple[int, Any, Future[Cost], Done] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="pool").start()

    def warm(self, stage: PackedStage) -> None:
        """Let every core import and set up a stage now."""
        for actor in self._actors:
            actor.warm.remote(stage)

    def look(self) -> None:
        """There may be work that there was not before."""
        self._news.put(None)

    def _run(self) -> None:
        while True:
            while min(self._load) < IN_FLIGHT and (found := self._work.next_task()) is not None:
                self._start(*found)
            news = self._news.get()
            if news is not None:
                at, ref, cost, done = news
                self._load[at] -= 1
                done(_outcome(ref, cost))

    def _start(self, task: Task, done: Done) -> None:
        at = self._load.index(min(self._load))
        self._load[at] += 1
        ref, cost = self._actors[at].process.options(num_returns=2).remote(task.rows, task.stage, task.epoch)
        # Not ray.wait in a loop: that wakes ten times a second for nothing, on a core that has samples to make.
        cost.future().add_done_callback(lambda made: self._news.put((at, ref, made, done)))


def _outcome(ref: Any, cost: Future[Cost]) -> Block | BaseException:
    error = cost.exception()
    return Block(ref=ref, cost=cost.result()) if error is None else error
