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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray

from offload.pipeline import stage as stages
from offload.pipeline.stage import Stage

IN_FLIGHT = 2  # tasks per actor: the one that runs, and the next
WAIT_S = 0.1  # how long to wait for a finished task before looking for a new one to start
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

    def warm(self, stage: PackedStage) -> None:
        """Import and set up what the stage needs, before there is work."""
        stage.ready()

    def process(self, rows: pa.Table, stage: PackedStage, epoch: int) -> tuple[pa.Table, Cost]:
        """The block of these rows, and its cost."""
        ready = stage.ready()
        cpu, wall = time.process_time(), time.perf_counter()
        block = stages.process(ready, rows, epoch=epoch)
        cost = Cost(
            rows=block.num_rows,
            size_bytes=block.nbytes,
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
        )
        return block, cost


class Work(Protocol):
    """Where the pool gets its tasks: see :meth:`Pool.__init__`."""

    def next_task(self) -> tuple[Task, Callable[[Block | BaseException], None]] | None:
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
        self._more = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="pool").start()

    def warm(self, stage: PackedStage) -> None:
        """Let every core import and set up a stage now."""
        for actor in self._actors:
            actor.warm.remote(stage)

    def look(self) -> None:
        """There may be work that there was not before."""
        with self._more:
            self._more.notify_all()

    def _run(self) -> None:
        running: dict[Any, tuple[int, Any, Callable[[Block | BaseException], None]]] = {}
        load = [0] * len(self._actors)
        while True:
            while min(load) < IN_FLIGHT and (found := self._work.next_task()) is not None:
                task, done = found
                at = load.index(min(load))
                process = self._actors[at].process.options(num_returns=2)
                ref, cost = process.remote(task.rows, task.stage, task.epoch)
                running[cost] = (at, ref, done)
                load[at] += 1
            if not running:
                with self._more:
                    self._more.wait(timeout=WAIT_S)
                continue
            ready, _ = ray.wait(list(running), num_returns=1, timeout=WAIT_S, fetch_local=True)
            for finished in ready:
                at, ref, done = running.pop(finished)
                load[at] -= 1
                done(_outcome(ref, finished))


def _outcome(ref: Any, cost: Any) -> Block | BaseException:
    try:
        return Block(ref=ref, cost=ray.get(cost))
    except Exception as error:
        return error
