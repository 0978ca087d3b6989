"""The tasks of a prediction, and the blocks of preprocessed samples that :class:`offload.DataLoader` makes of them.

A task holds some batches whole, and processes chunks of samples whole, which draw their random numbers together. So a batch has the
samples that it has in validation, whoever makes it and however often the prediction was interrupted.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.errors import OffloadError, RunError
from offload.loader.loader import DataLoader
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import Columns
from offload.pipeline.index.rows import IndexRows, Picked
from offload.pipeline.order.chunks import CHUNK, untrained, whole_chunks
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.preprocessing.processing import IndexRecipe, process
from offload.pipeline.preprocessing.watchdog import watch_of_process

MOST_SAMPLES = 512  # of a task, unless a batch has more


@dataclass(frozen=True, kw_only=True)
class Task:
    """Some samples in a row. ``number``: the task's place among all."""

    number: int
    rows: Picked


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks of a prediction over all rows of an index. ``batch_size``: the samples of a batch."""

    rows: IndexRows
    batch_size: int

    @property
    def size(self) -> int:
        """The samples of a task. They fit in memory, and are soon done."""
        whole = math.lcm(self.batch_size, CHUNK)
        return whole if whole <= MOST_SAMPLES else self.batch_size * max(MOST_SAMPLES // self.batch_size, 1)

    @property
    def cuts_chunks(self) -> bool:
        """Whether the end of a task may lie within a chunk. Both tasks then process that chunk whole."""
        return bool(self.size % CHUNK)

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)

    def samples(self, number: int) -> int:
        """The samples of one task."""
        return min(self.size, len(self.rows) - number * self.size)

    def task(self, number: int) -> Task:
        """One task."""
        start = number * self.size
        stop = start + self.samples(number)
        wanted = Ranges(((start, stop),))
        whole = whole_chunks(wanted, len(self.rows))
        return Task(number=number, rows=Picked(ids=whole.numbers(), source=self.rows, positions=whole, wanted=wanted))


@dataclass(frozen=True, kw_only=True)
class Block:
    """The preprocessed samples of a task, as columns of the wire format, and the user's name for each."""

    number: int
    rows: int
    columns: Columns
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """The words of an error that is meant for the user."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """The preprocessing of tasks, as a map-style data set whose indices are tasks. ``key``: its name in the processes that run it."""

    recipe: IndexRecipe
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __getitem__(self, task: Task) -> Block | _Failure:
        try:
            if self.key not in _ready:
                _ready.clear()
                _ready[self.key] = self.recipe.ready()
            recipe, table = _ready[self.key], task.rows.table()
            block = process(recipe, table, epoch=0, watch=watch_of_process())
            assert recipe.reader is not None
            names = tuple(recipe.reader.describe(table, row) for row in untrained(table).tolist())
            return Block(number=task.number, rows=block.num_rows, columns=wire.decode(block), names=names)
        except OffloadError as error:
            return _Failure(text=str(error))


_ready: dict[str, IndexRecipe] = {}  # of this process


def blocks(recipe: IndexRecipe, tasks: Iterable[Task], address: str | None) -> Iterator[Block]:
    """The blocks of the tasks, in their order, made on every core, which begins now.

    The iterator raises RunError, with the name of the sample, if one cannot be preprocessed.
    """
    loader = _Loader(
        Preprocessing(recipe=recipe),  # type: ignore[arg-type]  # torch's Dataset has no protocol
        batch_size=None,
        sampler=_Order(tasks),
        collate_fn=_same,
        address=address,
    )
    return map(_made, iter(loader))


def _made(block: Block | _Failure) -> Block:
    if isinstance(block, _Failure):
        raise RunError(block.text)
    return block


class _Loader(DataLoader[Any]):
    """A loader of which the user does not know."""

    says_engine = False


class _Order:
    """The tasks as a sampler, once."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)


def _same(block: Any) -> Any:
    return block


def in_order(tasks: Tasks, numbers: Sequence[int]) -> Iterator[Task]:
    """These tasks, each made when it is needed."""
    return map(tasks.task, numbers)
