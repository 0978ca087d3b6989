"""A preprocessing process of this machine: it does one task after another until its connection closes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from offload.loader.batch_recipe import FinishedBatches, IterableRecipe, MapRecipe, read_some
from offload.loader.local.tasks import BeginReading, Made, MakeBatches, NotPrepared, ReadOn, Ready, Slow
from offload.pipeline.pool.task import Cost
from offload.pipeline.preprocessing.environment import Ordinal, begin, keep_freed_memory
from offload.pipeline.preprocessing.watchdog import GIVEN_UP, Watch
from offload.pipeline.program import pickling
from offload.pipeline.program.remedies import remedy
from offload.process.messages import receive, send

AT_ONCE_S = 0.25  # longest gap between consecutive tasks; a longer one means that the process was idle


def work(connection: socket.socket, recipe: MapRecipe | IterableRecipe | bytes, ordinal: Ordinal) -> None:
    """The main function of the process. ``recipe``: itself where the process has inherited it, else pickled."""
    # Ctrl-C reaches every process of the terminal, but only the program answers it. The program's own handlers stay with the program.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_program, daemon=True, name="program").start()
    # Each line in one piece, as it is printed: other processes write to the same pipe.
    _each_stream(lambda stream: stream.reconfigure(line_buffering=True, write_through=False))
    keep_freed_memory()
    begin(ordinal)
    try:
        prepared = (pickling.loads(recipe) if isinstance(recipe, bytes) else recipe).ready()
    except Exception as error:  # the user's classes may raise anything
        traceback.print_exc()
        _tell(connection, NotPrepared(reason=f"{type(error).__name__}: {error}.{remedy(error)}"))
        return
    gc.freeze()  # collections would copy the pages that this process shares with the program
    _tell(connection, Ready())
    with contextlib.suppress(EOFError, OSError):  # the program has left the iteration
        _Worker(connection, prepared).run()


def _end_with_program() -> None:
    """End this process with the program, even if it is killed in the middle of a task."""
    program = multiprocessing.parent_process()
    if program is not None:
        program.join()
        os._exit(0)


def _each_stream(act: Callable[[Any], None]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the user's code may have replaced or closed it
            act(stream)


def _tell(connection: socket.socket, message: object) -> None:
    with contextlib.suppress(OSError):
        send(connection, message)


class _Reports:
    """Reports slow calls to the program."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def slow(self, what: str, seconds: float) -> None:
        _tell(self._connection, Slow(what=what, seconds=seconds))

    def given_up(self, what: str, seconds: float) -> None:
        os._exit(GIVEN_UP)


class _Worker:
    def __init__(self, connection: socket.socket, recipe: MapRecipe | IterableRecipe) -> None:
        self._connection, self._recipe = connection, recipe
        self._watch = Watch(_Reports(connection))
        self._watch.start()
        self._batches: Iterator[Any] = iter(())
        self._initialised: set[int] = set()
        self._ended: tuple[float, float] | None = None

    def run(self) -> None:
        """Do tasks until the connection closes. Raises EOFError then."""
        while True:
            task = receive(self._connection)
            if isinstance(task, BeginReading):
                assert isinstance(self._recipe, IterableRecipe)
                recipe = replace(self._recipe, seed=task.seed)
                self._batches = recipe.batches(self._watch, task.worker, self._initialised)
            else:
                made = self._made(task)
                _each_stream(lambda stream: stream.flush())  # the end of the program cannot lose half a line
                send(self._connection, made)
                # Sending belongs to the price of a task. What it made is freed before the next one.
                self._ended = time.process_time(), time.perf_counter()

    def _made(self, task: MakeBatches | ReadOn) -> Made:
        cpu, wall = time.process_time(), time.perf_counter()
        if self._ended is not None and wall - self._ended[1] < AT_ONCE_S:
            cpu = self._ended[0]
        ended = False
        if isinstance(task, ReadOn):
            block, ended = read_some(self._batches, task.most)
        else:
            assert isinstance(self._recipe, MapRecipe)
            block = self._recipe.make(task.orders, self._watch)
        return Made(block=block, cost=_cost(block, cpu, wall), ended=ended)


def _cost(block: FinishedBatches, cpu: float, wall: float) -> Cost:
    return Cost(
        rows=block.num_rows,
        size_bytes=block.nbytes,
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - wall,
    )
