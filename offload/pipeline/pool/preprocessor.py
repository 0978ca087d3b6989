"""The process of one core, which runs one task after another.

A block lies in the process's scratch memory until the next task, so the process hands it to the object store first.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import offload.process.ray_forks  # noqa: F401  # a transform may fork
from offload import machine
from offload.actors.errors import lost_errors
from offload.pipeline.cache import accounts
from offload.pipeline.pool.packed_recipe import PackedRecipe, TaskOutput, TaskRecipe
from offload.pipeline.pool.task import Cost
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.environment import Ordinal, begin, keep_freed_memory
from offload.pipeline.preprocessing.watchdog import GIVEN_UP, Watch
from offload.pipeline.program.output_tail import Teller

AT_ONCE_S = 0.25  # longest gap between consecutive tasks; a longer one means that the core was idle or in set-up
LAST_WORDS_S = 10.0  # time for the hub to answer a process that is about to end


class _HubReports:
    """Reports slow calls of a preprocessing process, and its cache's end, to the hub.

    ``hub``: the handle, or None; ``node``: where the process runs.
    """

    def __init__(self, hub: Any, node: str) -> None:
        self._hub, self._node = hub, node

    def slow(self, what: str, seconds: float) -> None:
        if self._hub is not None:
            self._hub.slow.remote(self._node, what, seconds)

    def given_up(self, what: str, seconds: float) -> None:
        if self._hub is not None:
            with contextlib.suppress(TimeoutError, *lost_errors()):
                self._hub.given_up.remote(self._node, what, seconds).future().result(LAST_WORDS_S)
        # Not sys.exit: the main thread is stuck in a call that no exception interrupts.
        os._exit(GIVEN_UP)

    def cache_stopped(self, reason: str) -> None:
        if self._hub is not None:
            self._hub.cache_stopped.remote(self._node, reason)


class Preprocessor:
    """The actor of one core.

    Args:
        hub: the handle of the hub, or of a DataLoader's feed, to which the process reports slow calls and what it prints; None: to nobody.
        me: its number in the pool.
        title: its name in Ray's dashboard.
        node: the id of its node.
    """

    def __init__(
        self, hub: Any = None, me: Ordinal | None = None, title: str = "preprocessing", node: str = ""
    ) -> None:
        self._title = title
        begin(me or Ordinal())
        keep_freed_memory()
        self._reports = _HubReports(hub, node)
        # Its thread must run before the first call of the user's code, which may hang.
        self._watch = Watch(self._reports)
        self._watch.start()
        self._teller = Teller(hub)
        self._scratch = Scratch()  # safe to reuse: a returned block is in the object store before the next call begins
        self._ended: tuple[float, float] | None = None
        self._done = 0  # tasks

    def __repr__(self) -> str:
        return self._title

    def warm(self, recipe: PackedRecipe) -> None:
        """Import and set up the needs of the recipe before there is work."""
        self._watch.doing(lambda: "setting up the preprocessing of a data set")
        try:
            with self._teller.working(recipe.key):
                recipe.ready()
        finally:
            self._watch.idle()

    def process(self, rows: Any, recipe: PackedRecipe, epoch: int) -> tuple[TaskOutput, Cost]:
        """Make the block of these rows, and return it with its cost."""
        with self._teller.working(recipe.key):
            return self._process(rows, recipe, epoch)

    def _process(self, rows: Any, recipe: PackedRecipe, epoch: int) -> tuple[TaskOutput, Cost]:
        ready: TaskRecipe = recipe.ready()
        cpu, wall = time.process_time(), time.perf_counter()
        busy = time.thread_time() + machine.core_wait_s()
        since = cpu
        if self._ended is not None and wall - self._ended[1] < AT_ONCE_S:
            since = self._ended[0]  # storing the last block is part of the price
        block = ready.process(rows, epoch=epoch, scratch=self._scratch, watch=self._watch)
        cpu_s, wall_s = time.process_time() - since, time.perf_counter() - wall
        blocked_s = wall_s - (time.thread_time() + machine.core_wait_s() - busy)
        # Measuring takes long, and the memory soon stops growing: measure after the first, second, fourth, … task.
        self._done += 1
        process_bytes = 0 if self._done & (self._done - 1) else machine.process_bytes()
        self._ended = time.process_time(), time.perf_counter()
        read = accounts.collect()
        if read.problem is not None:
            self._reports.cache_stopped(read.problem)
        cost = Cost(
            rows=block.num_rows, size_bytes=block.nbytes, cpu_s=cpu_s, wall_s=wall_s, process_bytes=process_bytes,
            blocked_s=blocked_s, cache_bytes=read.cache_bytes, storage_bytes=read.storage_bytes,
            first_wait_s=read.first_wait_s,
        )  # fmt: skip
        return block, cost
