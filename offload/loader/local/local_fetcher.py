"""An iteration's batches from processes of this machine.

The program's own thread gives out tasks and hears of finished ones, whenever it asks for a batch, as torch's DataLoader does. Only if
batches go to a device does a thread of the fetcher do so, and moves them there while the program trains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from offload.errors import OffloadError, RunError
from offload.loader.batch_recipe import BatchOrder, FinishedBatches
from offload.loader.iterator import END, PATIENCE_S, IterationPlan, finished, timed_out
from offload.loader.line import BatchPlace, IterableLine, MapLine
from offload.loader.local.children import Child, Children
from offload.loader.local.tasks import BeginReading, Made, MakeBatches, NotPrepared, ReadOn, Slow
from offload.loader.remarks import say
from offload.loader.state.epoch_progress import too_few
from offload.loader.stats import MadeRates
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.sizing import BATCH_TASK_S, batches_in, batches_per_task
from offload.pipeline.pool.task import Block

RECENT = 8  # tasks
IN_FLIGHT = 2  # tasks of a process: the running one and the next
TASK_BYTES = 4 << 20  # of a task with several batches: they lie in one piece of memory, which the last of them frees
ATTEMPTS = 4  # at a task whose process dies
READY = 2  # batches that are on the device before the program asks for them


@dataclass
class Usual:
    """What recent tasks of a loader took: seconds of work, and bytes, of a batch."""

    batch_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    batch_bytes: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, made: Made) -> None:
        """Count a task."""
        if batches := len(made.block.items):
            self.batch_s.append(made.cost.work_s / batches)
            self.batch_bytes.append(made.cost.size_bytes / batches)

    @property
    def work_s(self) -> float | None:
        """The seconds of work of a batch; None before the first."""
        return statistics.median(self.batch_s) if self.batch_s else None

    @property
    def most(self) -> int:
        """The number of batches that a task may have: what takes BATCH_TASK_S and fits into TASK_BYTES."""
        if not self.batch_bytes:
            return 1
        by_size = int(TASK_BYTES / max(statistics.median(self.batch_bytes), 1.0))
        return max(1, min(batches_in(BATCH_TASK_S, self.work_s), by_size))


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The processes of an iteration.

    Args:
        children: those that run already, or where new ones start.
        processes: their number.
        ahead: the batches of each that are made or under way while the program has not asked for them.
        fixed: whether the program has chosen ``ahead``. A task then has no more batches than that.
        usual: what recent tasks of the loader took.
        keep: takes the processes after the iteration, if it wants them.
    """

    children: Children
    processes: int
    ahead: int
    fixed: bool
    usual: Usual
    keep: Callable[[Children], bool]

    @property
    def most(self) -> int:
        """The number of batches that a task may have."""
        return max(1, min(self.usual.most, self.ahead // IN_FLIGHT)) if self.fixed else self.usual.most


class _Work(Protocol):
    """The tasks of an iteration."""

    @property
    def line(self) -> MapLine | IterableLine:
        """Its batches."""

    def begin(self) -> None:
        """Start the processes that are missing, and prepare all for the iteration."""

    def give(self, child: Child) -> None:
        """Give a process what it can take."""

    def made(self, child: Child, task: MakeBatches | ReadOn, made: Made) -> None:
        """Take a task's batches."""

    def lost(self, child: Child, how: str) -> None:
        """Act on the end of a process. Raises RunError if the iteration cannot go on."""


class _MapWork:
    """Any process makes any batch, several in a task if they are small."""

    def __init__(self, crew: Crew) -> None:
        self.line = MapLine()
        self._crew = crew
        self._attempts = Counter[int]()  # by the number of a task's first batch

    def begin(self) -> None:
        for number in range(len(self._crew.children.all), self._crew.processes):
            self._crew.children.start(number, self._crew.processes)

    def give(self, child: Child) -> None:
        while self.line.wanted and len(child.tasks) < IN_FLIGHT:
            count = batches_per_task(
                self._crew.usual.work_s, ahead=self.line.ahead, wanted=self.line.wanted, cores=self._crew.processes
            )
            child.give(MakeBatches(orders=self.line.begin(min(count, self._crew.most))))

    def made(self, child: Child, task: MakeBatches | ReadOn, made: Made) -> None:
        assert isinstance(task, MakeBatches)
        self.line.finish(task.orders, made.block, node="", size_bytes=made.cost.size_bytes)

    def lost(self, child: Child, how: str) -> None:
        for task in reversed(child.tasks):
            assert isinstance(task, MakeBatches)
            self.line.again(task.orders)
        if child.tasks:  # the process was at work on the first
            first = child.tasks[0]
            assert isinstance(first, MakeBatches)
            number = first.orders[0].number
            self._attempts[number] += 1
            if self._attempts[number] >= ATTEMPTS:
                raise RunError(
                    f"preprocessing failed: the {ATTEMPTS} processes that got the same samples have died, one after the other. The last "
                    f"{how}. A library of the data set crashes on them, or this machine has too little memory."
                )
        self.give(self._crew.children.start(child.number, self._crew.processes))


class _IterableWork:
    """Each process reads its own share, as one worker of torch."""

    def __init__(self, crew: Crew, seed: int) -> None:
        self.line = IterableLine(crew.processes)
        self._crew, self._seed = crew, seed

    def begin(self) -> None:
        children = self._crew.children
        there = {child.number for child in children.all}
        for worker in range(self._crew.processes):
            if worker not in there:
                children.start(worker, self._crew.processes)
        for child in children.all:
            child.tell(BeginReading(worker=child.number, seed=self._seed))
            self.give(child)

    def give(self, child: Child) -> None:
        while len(child.tasks) < IN_FLIGHT and not self.line.has_ended(child.number):
            under_way = sum(task.most for task in child.tasks if isinstance(task, ReadOn))
            room = self._crew.ahead * self._crew.most - self.line.waiting(child.number) - under_way
            if room <= 0:
                return
            child.give(ReadOn(most=min(self._crew.most, room)))

    def made(self, child: Child, task: MakeBatches | ReadOn, made: Made) -> None:
        if self.line.has_ended(child.number):
            return  # a task that was under way at the end of the data set
        for item in range(len(made.block.items)):
            self.line.add(child.number, BatchPlace(made.block, item, ""))
        if made.ended:
            self.line.end(child.number)

    def lost(self, child: Child, how: str) -> None:
        if not self.line.has_ended(child.number):
            raise RunError(
                f"a preprocessing process that reads an iterable data set has died (it {how}), and its batches cannot be made again. Go on "
                "from the last state_dict(), or use a map-style data set."
            )


class LocalFetcher:
    """See :class:`offload.loader.iterator.Fetcher`."""

    def __init__(self, plan: IterationPlan, crew: Crew) -> None:
        self._plan, self._crew = plan, crew
        self._work: _Work = _MapWork(crew) if plan.orders is not None else _IterableWork(crew, plan.recipe.seed)
        self._start, self._skip = 0, 0 if plan.orders is not None else plan.skip
        self._meter = Meter(lambda: {"": crew.processes})
        self._items: queue.Queue[tuple[Any, int]] | None = queue.Queue(READY) if plan.finish.works else None
        # Guards the line and the processes' tasks, which the program's thread and the fetcher's use.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._over = False
        self._pid = os.getpid()

    @property
    def lead(self) -> int:
        """The number of batches to order ahead."""
        return self._crew.processes * self._crew.ahead * (1 if self._crew.fixed else self._crew.most) + 1

    def open(self) -> int:
        """See :meth:`offload.loader.iterator.Fetcher.open`."""
        self._work.begin()
        if self._items is not None:
            self._thread = threading.Thread(target=self._run, args=(self._items,), daemon=True, name="offload-loader")
            self._thread.start()
        return self.lead

    def order(self, orders: list[BatchOrder]) -> None:
        """See :meth:`offload.loader.iterator.Fetcher.order`."""
        with self._lock:
            assert isinstance(self._work.line, MapLine)
            self._work.line.order(orders)
            self._give()

    def get(self, timeout_s: float) -> tuple[Any, int]:
        """See :meth:`offload.loader.iterator.Fetcher.get`."""
        until = time.monotonic() + timeout_s if timeout_s else float("inf")
        while True:
            wait_s = max(min(PATIENCE_S, until - time.monotonic()), 0.0)
            if self._items is None:
                item = self._next(wait_s)
                if item is not None:
                    return item
            else:
                with contextlib.suppress(queue.Empty):
                    return self._items.get(timeout=wait_s)
            if time.monotonic() >= until:
                raise timed_out(timeout_s)

    def hand_over(self, batch: Any) -> None:
        """See :meth:`offload.loader.iterator.Fetcher.hand_over`."""
        self._plan.finish.hand_over(batch)

    def asked(self) -> Callable[[], MadeRates]:
        """See :meth:`offload.loader.iterator.Fetcher.asked`."""
        return functools.partial(_measured, self._meter, self._crew.processes)

    def tell_counts(self) -> None:
        """Do nothing: the processes write to the program's own output."""

    def close(self, *, over: bool = False) -> None:
        """See :meth:`offload.loader.iterator.Fetcher.close`."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._over = over
        self._closed.set()
        if self._thread is None:
            self._leave()
            return
        # The thread may be about to use the processes' connections: it leaves them itself.
        self._crew.children.wake()
        if over:  # the next iteration may want the processes
            self._thread.join()

    def _leave(self) -> None:
        """Keep the processes for the loader's next iteration, or end them."""
        children = self._crew.children
        idle = self._over and not any(child.tasks for child in children.all)
        if not (idle and self._crew.keep(children)):
            children.end()

    def _run(self, items: queue.Queue[tuple[Any, int]]) -> None:
        """Put the batches into the queue, on the fetcher's thread."""
        item: Any = None
        try:
            self._plan.finish.begin()
            while item is not END and not self._closed.is_set():
                next_item = self._next(PATIENCE_S)
                if next_item is not None:
                    item = next_item[0]
                    self._put(items, next_item)
        except BaseException as error:
            self._put(items, (error if isinstance(error, OffloadError) else _lost(error), 0))
        self._closed.wait()
        self._leave()

    def _put(self, items: queue.Queue[tuple[Any, int]], item: tuple[Any, int]) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                items.put(item, timeout=PATIENCE_S)
                return

    def _next(self, wait_s: float) -> tuple[Any, int] | None:
        """The next batch, exception or END with the number of its samples; None if there is none within about ``wait_s``."""
        until = time.monotonic() + wait_s
        while True:
            with self._lock:
                places = self._work.line.deliver(self._start, 1)
                if places:
                    self._start += 1
                    self._work.line.deliver(self._start, 0)  # the line keeps no memory that the program may free
                elif self._work.line.over(self._start):
                    return self._end()
            if places and self._start > self._skip:
                block: FinishedBatches = places[0].ref
                return finished(self._plan, block, places[0].item), block.samples_per_batch
            if not places:
                if (left := until - time.monotonic()) <= 0:
                    return None
                self._hear(left)

    def _end(self) -> tuple[Any, int]:
        return (END if self._start >= self._skip else too_few(self._skip, "data set", self._start)), 0

    def _hear(self, wait_s: float) -> None:
        heard = self._crew.children.hear(wait_s)
        with self._lock:
            for child, message in heard:
                if message is None:
                    self._lost(child)
                elif isinstance(message, Made):
                    self._crew.usual.add(message)
                    self._meter.add(Block(ref=None, cost=message.cost))
                    self._work.made(child, child.tasks.popleft(), message)
                elif isinstance(message, NotPrepared):
                    raise RunError(f"a preprocessing process could not load the data set: {message.reason}")
                elif isinstance(message, Slow):
                    say(f"{message.what} has already taken {message.seconds:.0f} s")
            self._give()

    def _give(self) -> None:
        """Give each process what it can take: first one task each, so that none gets two while another has none."""
        for child in sorted(self._crew.children.all, key=lambda child: len(child.tasks)):
            self._work.give(child)

    def _lost(self, child: Child) -> None:
        how = child.end_in_words
        if not child.ready:
            raise RunError(
                f"a preprocessing process {how} before it had begun. Its output above says more. Where processes start by "
                'spawn or forkserver, Python imports the script anew: what starts work there must stand under if __name__ == "__main__":'
            )
        self._work.lost(child, how)


def _lost(error: BaseException) -> RunError:
    lines = str(error).strip().splitlines()
    return RunError(f"the DataLoader's thread failed: {type(error).__name__}: {lines[0] if lines else 'no message'}.")


def _measured(meter: Meter, processes: int) -> MadeRates:
    return MadeRates({"cores": float(processes), **meter.summary()}, meter.costs())
