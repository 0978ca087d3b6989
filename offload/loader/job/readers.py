"""The processes that read iterable data sets, and which of them wait for their loader's next iteration.

A worker of an iterable data set has a process of its own, which serves one iteration at a time. Afterwards it rests: a new process would
take longer to start than a small epoch takes. In each iteration it gets the data set anew.

Where it stops: :mod:`offload.loader.job.loader_feed` starts and ends the processes.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.loader.batch_recipe import FinishedBatches, IterableRecipe, read_some
from offload.pipeline.feed.sizing import MOST_BATCHES
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.pool.task import Cost
from offload.pipeline.preprocessing.environment import keep_freed_memory
from offload.pipeline.preprocessing.watchdog import NoReports, Watch
from offload.pipeline.program.output_tail import Teller

KEPT_S = 30.0  # time for the next iteration to come. After such a break, the start of processes does not matter
STUCK_S = 10.0  # time for the user's code of an ended iteration to end
KEPT_PER_CORE = 4  # processes of all loaders that rest: one each for training, validation and test data, and one more


class Read(NamedTuple):
    """The result of a call: the number of batches made, whether they were the last, and their cost."""

    batches: int
    ended: bool
    cost: Cost


class IterableReader:
    """The process of one worker of an iterable data set. ``run``: the feed's handle, to which it reports what it prints."""

    def __init__(self, run: Any = None) -> None:
        keep_freed_memory()
        gc.freeze()  # collections need not look at imported modules
        self._teller = Teller(run)
        self._watch = Watch(NoReports())
        self._packed: PackedRecipe | None = None
        self._key = ""
        self._worker = 0
        self._batches: Any = None
        self._threads = 0

    def __repr__(self) -> str:
        return "DataLoader reader"

    def begin(self, recipe: PackedRecipe, worker: int) -> None:
        """Begin an iteration, as this worker."""
        self._packed, self._key, self._worker = recipe, recipe.key, worker

    def read(self) -> tuple[FinishedBatches, Read]:
        """The next batches: one or more, for about BATCH_TASK_S."""
        with self._teller.working(self._key):
            return self._read()

    def _read(self) -> tuple[FinishedBatches, Read]:
        if self._packed is not None:
            recipe: IterableRecipe = self._packed.anew()
            self._batches, self._packed = recipe.batches(self._watch, self._worker), None
        cpu, wall = time.process_time(), time.perf_counter()
        block, ended = read_some(self._batches, MOST_BATCHES)
        cost = Cost(
            rows=block.num_rows,
            size_bytes=block.nbytes,
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
        )
        return block, Read(len(block.items), ended, cost)

    def rest(self) -> bool:
        """Forget the iteration. Return whether this process may serve another: not if iterations leave threads behind."""
        self._packed = self._batches = None
        gc.collect()
        threads = threading.active_count()
        before, self._threads = self._threads or threads, threads
        return threads <= before


@dataclass(eq=False, kw_only=True)
class ReadingProcess:
    """A process, as the feed knows it.

    Args:
        actor: its handle.
        node: its node.
        client: the process that iterates.
        owner: the loader.
        worker: the worker's number.
        begun: the answer to the beginning of its present iteration.
        kept: whether it has waited for its present iteration.
    """

    actor: Any
    node: str
    client: str
    owner: str
    worker: int
    begun: Future[None] | None = None
    kept: bool = False

    @property
    def was_gone(self) -> bool:
        """Whether a reused process was already gone when its present iteration began. Valid after an error that ends all its calls."""
        return self.kept and self.begun is not None and self.begun.exception() is not None


@dataclass
class _Rest:
    """The rest of a reader.

    Args:
        since: the time at which its last iteration ended.
        ready: the user's code of that iteration has ended, too.
    """

    since: float
    ready: bool = False


class Resting:
    """The readers that serve no iteration. Pure: it starts and ends none, but returns those that should end.

    A reader serves its own loader again, as the same worker: what the user's code has set in the process, such as its affinity, belongs
    to this worker.
    """

    def __init__(self) -> None:
        self._rests: dict[ReadingProcess, _Rest] = {}  # the oldest first

    def rest(self, reader: ReadingProcess, now: float) -> None:
        """Note that a reader's iteration has ended, though its code may still run."""
        self._rests[reader] = _Rest(now)

    def ready(self, reader: ReadingProcess, most: int) -> list[ReadingProcess]:
        """Note that a reader could serve another iteration. Return the surplus readers, to be ended.

        A surplus is an older reader of the same worker, and the oldest readers of other loaders if more than ``most`` are ready.
        """
        if reader not in self._rests:
            return []
        rest = self._rests.pop(reader)
        same = [other for other in self._ready() if (other.owner, other.worker) == (reader.owner, reader.worker)]
        self._rests[reader] = _Rest(rest.since, ready=True)
        of_others = [other for other in self._ready() if other.owner != reader.owner]
        over = max(len(self._ready()) - len(same) - most, 0)
        return self._dropped([*same, *of_others[:over]])

    def awaited(self, owner: str) -> bool:
        """Return whether the user's code still runs in a reader of this loader."""
        return any(reader.owner == owner and not rest.ready for reader, rest in self._rests.items())

    def reuse(self, owner: str, worker: int, nodes: Collection[str]) -> ReadingProcess | None:
        """End the rest of a reader of this loader's worker that is ready, and return it. None if there is none on these nodes."""
        for reader in self._ready():
            if (reader.owner, reader.worker) == (owner, worker) and reader.node in nodes:
                del self._rests[reader]
                return reader
        return None

    def drop(self, which: Callable[[ReadingProcess], bool]) -> list[ReadingProcess]:
        """Forget some readers, and return them."""
        return self._dropped([reader for reader in self._rests if which(reader)])

    def late(self, now: float) -> list[ReadingProcess]:
        """Forget those that have rested for long, or whose code does not end, and return them."""

        def is_late(reader: ReadingProcess) -> bool:
            rest = self._rests[reader]
            return now - rest.since > (KEPT_S if rest.ready else STUCK_S)

        return self.drop(is_late)

    def _ready(self) -> list[ReadingProcess]:
        return [reader for reader, rest in self._rests.items() if rest.ready]

    def _dropped(self, readers: list[ReadingProcess]) -> list[ReadingProcess]:
        for reader in readers:
            del self._rests[reader]
        return readers
