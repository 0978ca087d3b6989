"""The tasks of one pass, in their order, and the blocks that come back.

A pass over an index has tasks of so many rows, sized when a core takes one. A pass over units has tasks of a few whole units,
whose number of samples only running them tells.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import RunError
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.pace import ANY, BlockRoom
from offload.pipeline.feed.passes import Pass, Slice
from offload.pipeline.feed.sizing import aligned, block_bytes, block_room, for_speed, plan_tasks, rows_in
from offload.pipeline.index.rows import IndexRows, Picked, open_rows
from offload.pipeline.order.chunks import CHUNK, chunk_end, whole_chunks
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.unit_ids import TrainedPart, UnitIds
from offload.pipeline.pool.task import Block, Task


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PassTask:
    """A task of a pass, under way on a core (an :class:`Assignment`).

    Args:
        tasks: the tasks of the pass, which take the outcome.
        task: what the core does.
        number: its place among the tasks of the pass.
        node: the node of the core.
        rows: about how many rows its block will have.
    """

    tasks: PassTasks
    task: Task
    number: int
    node: str
    rows: int

    def finished(self, block: Block) -> None:
        """Put the block into the pass."""
        self.tasks.finished(self, block)

    def failed(self, error: BaseException) -> None:
        """Fail the pass."""
        self.tasks.failed(self, error)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RepeatedTask:
    """A task that runs again because its block is lost, for the sake of one rank's slice (an :class:`Assignment`).

    Args:
        tasks: the tasks of the pass.
        task: what made the lost block.
        rows: the rows that the lost block had.
        piece: the slice of the lost block.
        current: the pass, which owes the slice to the rank.
        rank: the rank.
    """

    tasks: PassTasks
    task: Task
    rows: int
    piece: Slice
    current: Pass
    rank: int

    def finished(self, block: Block) -> None:
        """Repay the slice with the same rows of the new block."""
        try:
            if block.cost.rows != self.rows:
                raise RunError(
                    f"a task made {block.cost.rows} samples of the units that gave {self.rows} before their node was lost. The steps "
                    "of the data set must depend on their rows and seeded random numbers alone."
                )
            self.tasks.remember(self.task, block)
            self.current.repay(self.rank, self.piece._replace(ref=block.ref, node=block.node))
        except BaseException as error:
            self.current.fail(error)

    def failed(self, error: BaseException) -> None:
        """Fail the pass."""
        self.current.fail(error)


class PassTasks(ABC):
    """The tasks of a pass, each sized when a core asks for it. It puts their blocks into the pass, and can make a block again."""

    def __init__(self, stream: FeedDataset, current: Pass, meter: Meter, cores: Callable[[], Cores]) -> None:
        self._packed, self._pass, self._meter, self._cores = stream.recipe, current, meter, cores
        # Only a size to aim at: adaptation may change the batch in the middle of a pass, and a block then holds parts
        # of batches.
        self._local_batch_size = current.request.first_rows // current.request.world_size
        self._planned: deque[int] = deque()
        # Cores finish on the pool's thread while the feed asks for more on others, so counters have a lock of their
        # own.
        self._issued = self._unfinished = 0
        self._counting = threading.Lock()
        self._rows_under_way: Counter[str] = Counter()  # by node
        self._tasks_under_way: Counter[str] = Counter()
        # Keyed by the block's name: a reference would keep every block of the pass in the object store.
        self._task_of: dict[str, tuple[Task, int]] = {}  # with the block's rows

    @abstractmethod
    def exhausted(self) -> bool:
        """Return whether all tasks are issued."""

    @abstractmethod
    def left(self) -> int:
        """The approximate number of rows that no task holds yet."""

    @abstractmethod
    def _least(self) -> int:
        """The approximate number of rows of the smallest next task."""

    @abstractmethod
    def _cut(self, size: int, most: float) -> tuple[Any, int]:
        """Cut the next task from what is left. Return what it processes, and its approximate number of rows: close to ``size``, and not
        above ``most`` unless the smallest possible task is."""

    def next_task(self, node: str, room: BlockRoom = ANY) -> PassTask | None:
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
        # A row at least, whatever the limits say: a single sample may be larger than what a node should hold.
        size = int(max(1, min(size, self._most_rows(node, size), self._rows_for(room.good_bytes))))
        cut, rows = self._cut(size, most)
        task = Task(recipe=self._packed, rows=cut, epoch=self._pass.request.epoch)
        with self._counting:
            # Counted at once: the next core asks before this task has made anything, and must see that its link is
            # busy.
            self._rows_under_way[node] += rows
            self._tasks_under_way[node] += 1
        return PassTask(tasks=self, task=task, number=number, node=node, rows=rows)

    def _plan(self) -> None:
        cores = self._cores()
        count = max(cores.cores, 1)  # a core may ask once more when preprocessing has just been withdrawn from all
        sizes = plan_tasks(
            self.left(),
            cores=count,
            first_rows=self._pass.request.first_rows,
            rates=self._meter.rates(),
            block_bytes=block_bytes(cores.store_bytes, count),
            local_batch_size=self._local_batch_size,
        )
        self._planned.extend(sizes)

    def _most_rows(self, node: str, otherwise: int) -> int:
        """The most rows of a block that fit in this node's share of the object store; ``otherwise`` if that is unknown."""
        rates, cores = self._meter.rates(), self._cores()
        if rates is None or node not in cores.stores:
            return otherwise
        usual = block_bytes(cores.stores[node], max(cores.by_node[node], 1))
        return max(1, int(rows_in(block_room(usual, rates, cores.cores), rates)))

    def _rows_for(self, size_bytes: float) -> float:
        """The rows whose block has so many bytes; infinite before the first measurement."""
        rates = self._meter.rates()
        return math.inf if rates is None else rows_in(size_bytes, rates)

    def under_way(self) -> bool:
        """Return whether the block of an issued task is still to come."""
        return self._unfinished > 0

    def tasks_under_way(self, node: str) -> int:
        """The tasks that a node has not finished yet."""
        return self._tasks_under_way[node]

    def rows_under_way(self) -> Counter[str]:
        """The approximate number of rows of unfinished tasks, by node."""
        return self._rows_under_way

    def bytes_under_way(self, node: str) -> float:
        """The approximate bytes of the blocks that a node has not finished yet."""
        rates = self._meter.rates()
        return 0.0 if rates is None else self._rows_under_way[node] * rates.bytes_per_sample

    def bytes_under_way_beyond(self, nodes: Collection[str]) -> float:
        """The approximate bytes of the blocks that all nodes but these have not finished yet."""
        rates, rows = self._meter.rates(), self._rows_under_way
        return 0.0 if rates is None else (rows.total() - sum(rows[node] for node in nodes)) * rates.bytes_per_sample

    def repeat(self, piece: Slice, rank: int) -> RepeatedTask:
        """The task that makes the block of this rank's lost slice again."""
        task, rows = self._task_of[piece.ref.hex()]
        return RepeatedTask(tasks=self, task=task, rows=rows, piece=piece, current=self._pass, rank=rank)

    def remember(self, task: Task, block: Block) -> None:
        """Note which task made a block, in case it is lost."""
        self._task_of[block.ref.hex()] = task, block.cost.rows

    def _begin(self) -> int:
        """Count a task as unfinished, and return its number. This comes before :meth:`_cut`: in between, with its rows cut and the task not
        counted, the pass would seem to be over."""
        with self._counting:
            number = self._issued
            self._issued += 1
            self._unfinished += 1
        return number

    def finished(self, assignment: PassTask, block: Block) -> None:
        """Put the block of a task into the pass, and end the pass behind the last one."""
        self._not_under_way(assignment)
        self._meter.add(block)
        self.remember(assignment.task, block)
        self._learn(assignment.task, block)
        self._pass.put(assignment.number, block)
        # Only now: a task counts as unfinished until its block is in the pass, which might otherwise end without it.
        with self._counting:
            self._unfinished -= 1
            over = self.exhausted() and not self._unfinished
        if over:
            self._pass.end()

    def failed(self, assignment: PassTask, error: BaseException) -> None:
        """Fail the pass: a task raised this error."""
        self._not_under_way(assignment)
        self._pass.fail(error)
        with self._counting:
            self._unfinished -= 1

    def _not_under_way(self, assignment: PassTask) -> None:
        with self._counting:
            self._rows_under_way[assignment.node] -= assignment.rows
            self._tasks_under_way[assignment.node] -= 1

    def _learn(self, task: Task, block: Block) -> None:  # noqa: B027  # most tasks have nothing to learn
        """Learn from a finished block."""


class IndexTasks(PassTasks):
    """The tasks of a pass over an indexed source. A task gets its size when a core takes it."""

    def __init__(
        self, stream: FeedDataset, rows: IndexRows, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        super().__init__(stream, current, meter, cores)
        open_rows(rows)
        self._index = rows
        self._order = stream.order(current.request.epoch)
        self._positions = current.request.missing(len(self._order))
        self._cursor = 0
        self._rows = [0] * current.request.world_size
        if not len(self._positions):
            current.end()

    def exhausted(self) -> bool:
        return self._cursor >= len(self._positions)

    def left(self) -> int:
        return len(self._positions) - self._cursor

    def _least(self) -> int:
        return self._end_of(1) - self._cursor

    def _cut(self, size: int, most: float) -> tuple[Picked, int]:
        # Foresee the allotment: the next block will go to the rank with the fewest rows, and should end on a boundary of its batches.
        rank = self._rows.index(min(self._rows))
        size = aligned(size, self._rows[rank], self._local_batch_size)
        stop = self._end_of(int(max(1, min(size, most - CHUNK + 1))))
        wanted = self._positions.between(self._cursor, stop)
        self._rows[rank] += len(wanted)
        self._cursor = stop
        # A transform's chunk is always processed whole, so that its random numbers and its batch do not depend on where a resume cuts.
        whole = whole_chunks(wanted, len(self._order))
        parts = [self._order[start:end] for start, end in whole.pairs]
        # One part is a view, which takes no memory: the pass keeps every task until its end, in case its block is lost.
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Picked(ids=ids, source=self._index, positions=whole, wanted=wanted), len(wanted)

    def _end_of(self, size: int) -> int:
        """The end of a next task of about ``size`` rows; it is never inside a transform's chunk."""
        return chunk_end(self._positions, min(self._cursor + size, len(self._positions)))


ROWS_UNKNOWN = 64  # assumed rows of a unit, until the first ones were made


class UnitTasks(PassTasks):
    """The tasks of a pass over units. Each holds whole units: about as many rows as one of :class:`IndexTasks`."""

    def __init__(
        self, stream: FeedDataset, units: pa.Table, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        super().__init__(stream, current, meter, cores)
        self._units = units
        ids = UnitIds(units.num_rows)
        try:
            self._trained = ids.trained(Ranges(current.request.done))
        except ValueError as error:
            raise RunError(
                f"the checkpoint's record of the epoch does not fit the data set: {error}. Begin a new run."
            ) from None
        order = stream.order(current.request.epoch)
        self._order = [unit for unit in order.tolist() if not (unit in self._trained and self._trained[unit].whole)]
        self._known = units.column("rows").to_pylist()
        self._cursor = 0
        self._seen_units = self._seen_rows = 0
        known = [self._rows_in(unit) for unit in self._order]
        self._known_left = sum(rows for rows in known if rows is not None)
        self._unknown_left = known.count(None)
        if not self._order:
            current.end()

    def exhausted(self) -> bool:
        return self._cursor >= len(self._order)

    def left(self) -> int:
        return max(round(self._known_left + self._usual() * self._unknown_left), 1)

    def _least(self) -> int:
        return round(self._expected(self._order[self._cursor]))

    def _cut(self, size: int, most: float) -> tuple[pa.Table, int]:
        """The next units: at least one, and otherwise as many as come closest to ``size`` rows."""
        units, rows = [self._order[self._cursor]], self._expected(self._order[self._cursor])
        self._cursor += 1
        # Behind a filter, units may hold next to nothing. Without a limit, one task would take all units that are left.
        share = max((len(self._order) - self._cursor) // (2 * max(self._cores().cores, 1)), 1)
        while not self.exhausted():
            following = self._expected(self._order[self._cursor])
            if rows + following / 2 > size or rows + following > most:
                break
            # Before the first unit was processed, one may hold a handful of rows or millions.
            if self._rows_in(self._order[self._cursor]) is None and (len(units) >= share or not self._seen_units):
                break
            units.append(self._order[self._cursor])
            rows += following
            self._cursor += 1
        known = [self._rows_in(unit) for unit in units]
        self._known_left -= sum(count for count in known if count is not None)
        self._unknown_left -= known.count(None)
        return self._rows_of(units), round(rows)

    def _expected(self, unit: int) -> float:
        """The approximate number of rows of a unit."""
        if (rows := self._rows_in(unit)) is not None:
            return float(rows)
        return self._usual()

    def _usual(self) -> float:
        """The approximate number of rows of a unit about which nothing is known: the mean over finished units."""
        return self._seen_rows / self._seen_units if self._seen_rows else ROWS_UNKNOWN

    def _rows_in(self, unit: int) -> int | None:
        """The rows of a unit that are not trained yet; None if only making it tells."""
        if (trained := self._trained.get(unit)) is not None:
            return trained.count - len(trained.done)
        rows: int | None = self._known[unit]
        return rows

    def _rows_of(self, units: list[int]) -> pa.Table:
        trained = [self._trained.get(unit, TrainedPart(-1, Ranges())) for unit in units]
        table = self._units.take(pa.array(units, pa.int64())).combine_chunks()
        table = table.append_column("unit", pa.array(units, pa.int64()))
        table = table.append_column("count", pa.array([t.count if t.count >= 0 else None for t in trained], pa.int64()))
        flat = [[edge for pair in t.done.pairs for edge in pair] for t in trained]
        return table.append_column("done", pa.array(flat, pa.list_(pa.int64())))

    def _learn(self, task: Task, block: Block) -> None:
        self._seen_units += task.rows.num_rows
        self._seen_rows += block.cost.rows
