"""The tasks of one pass, in their order, and the blocks that come back."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any

from offload.errors import RunError
from offload.pipeline.meter import Meter
from offload.pipeline.pace import ANY, Room
from offload.pipeline.passes import Pass, Slice
from offload.pipeline.pool import Block, Task
from offload.pipeline.sizing import block_bytes, for_speed, plan_tasks
from offload.pipeline.streams import Cores, Stream

Issued = tuple[Task, Callable[[Block | BaseException], None]]
"""A task, and the function to call with its block or error."""


class PassTasks(ABC):
    """The tasks of a pass, each sized when a core takes it. It puts their blocks into the pass, and can make a block again."""

    def __init__(self, stream: Stream, current: Pass, meter: Meter, cores: Callable[[], Cores]) -> None:
        self._packed, self._pass, self._meter, self._cores = stream.recipe, current, meter, cores
        self._local_batch_size = current.request.first_rows // current.request.world_size
        self._planned: deque[int] = deque()
        self._issued = self._unfinished = 0
        self._counting = threading.Lock()
        self._rows_under_way: Counter[str] = Counter()  # by node
        self._tasks_under_way: Counter[str] = Counter()
        # Keyed by the block's name: a reference would keep every block of the pass in the object store.
        self._made_by: dict[str, tuple[Task, int]] = {}

    @abstractmethod
    def exhausted(self) -> bool:
        """Whether all tasks are issued."""

    @abstractmethod
    def left(self) -> int:
        """The rows that no task holds yet, about."""

    @abstractmethod
    def _least(self) -> int:
        """The rows of the smallest next task, about."""

    @abstractmethod
    def _cut(self, size: int, most: float) -> tuple[Any, int]:
        """What the next task gets to process, and about how many rows that is: about ``size``, and no more than ``most`` if fewer can be
        cut."""

    def next(self, node: str, room: Room = ANY) -> Issued | None:
        """The next task, for a core of this node; None if all are issued, or if a block would outgrow ``room.most_bytes``."""
        if self.exhausted():
            return None
        most = self._rows_for(room.most_bytes)
        if room.most_bytes <= 0 or self._least() > most:
            return None
        number = self._begin()
        if not self._planned:
            self._plan()
        size = for_speed(self._planned.popleft(), self._meter.over_fastest(node), self._local_batch_size)
        size = int(max(1, min(size, self._most_rows(node, size), self._rows_for(room.good_bytes))))
        cut, rows = self._cut(size, most)
        task = Task(recipe=self._packed, rows=cut, epoch=self._pass.request.epoch)
        with self._counting:
            self._rows_under_way[node] += rows
            self._tasks_under_way[node] += 1

        def made(block: Block | BaseException) -> None:
            with self._counting:
                self._rows_under_way[node] -= rows
                self._tasks_under_way[node] -= 1
            self._made(number, task, block)

        return task, made

    def _plan(self) -> None:
        cores = self._cores()
        sizes = plan_tasks(
            self.left(),
            cores=cores.cores,
            first_rows=self._pass.request.first_rows,
            rates=self._meter.rates(),
            block_bytes=block_bytes(cores.store_bytes, cores.cores),
            local_batch_size=self._local_batch_size,
        )
        self._planned.extend(sizes)

    def _most_rows(self, node: str, otherwise: int) -> int:
        """The most rows of a block that fit in this node's share of the object store; ``otherwise`` if that is unknown."""
        rates, cores = self._meter.rates(), self._cores()
        if rates is None or node not in cores.stores:
            return otherwise
        room = block_bytes(cores.stores[node], max(cores.by_node[node], 1))
        return max(1, int(room / max(rates.bytes_per_sample, 1.0)))

    def _rows_for(self, size_bytes: float) -> float:
        """The rows whose block has so many bytes; infinite before the first measurement."""
        rates = self._meter.rates()
        return math.inf if rates is None else size_bytes / max(rates.bytes_per_sample, 1.0)

    def under_way(self) -> bool:
        """Whether the block of an issued task is still to come."""
        return self._unfinished > 0

    def tasks_under_way(self, node: str) -> int:
        """The tasks that a node has not finished yet."""
        return self._tasks_under_way[node]

    def rows_under_way(self) -> Counter[str]:
        """The rows of tasks that are not finished yet, by node, about."""
        return self._rows_under_way

    def bytes_under_way(self, node: str) -> float:
        """The bytes of blocks that a node has not finished yet, about."""
        rates = self._meter.rates()
        return 0.0 if rates is None else self._rows_under_way[node] * rates.bytes_per_sample

    def bytes_under_way_beyond(self, nodes: Collection[str]) -> float:
        """The bytes of blocks that all but these nodes have not finished yet, about."""
        rates, rows = self._meter.rates(), self._rows_under_way
        return 0.0 if rates is None else (rows.total() - sum(rows[node] for node in nodes)) * rates.bytes_per_sample

    def again(self, piece: Slice) -> tuple[Task, Callable[[Block], Slice]]:
        """The task that makes a lost slice's block again, and a function that finds the slice in the new block."""
        task, rows = self._made_by[piece.ref.hex()]

        def found(block: Block) -> Slice:
            if block.cost.rows != rows:
                raise RunError(
                    f"a task made {block.cost.rows} samples of the units that gave {rows} before their node was lost. The steps of the "
                    "data set must depend on their rows and seeded random numbers alone."
                )
            self._made_by[block.ref.hex()] = task, rows
            return piece._replace(ref=block.ref, node=block.node)

        return task, found

    def _begin(self) -> int:
        """Count a task as under way, before its rows leave those to come: in between, the pass would seem to be over. Return its number."""
        with self._counting:
            number = self._issued
            self._issued += 1
            self._unfinished += 1
        return number

    def _made(self, number: int, task: Task, made: Block | BaseException) -> None:
        if isinstance(made, BaseException):
            self._pass.fail(made)
        else:
            self._meter.add(made)
            self._made_by[made.ref.hex()] = task, made.cost.rows
            self._note(task, made)
            if not self._pass.closed:
                self._pass.put(number, made)
        with self._counting:
            self._unfinished -= 1
            over = self.exhausted() and not self._unfinished
        if over and not isinstance(made, BaseException):
            self._pass.end()

    def _note(self, task: Task, made: Block) -> None:  # noqa: B027  # most tasks have nothing to learn
        """Learn from a finished block."""
