"""Sources whose samples are known only once a unit of them is made, and the recipe that makes units in a preprocessing process.

Such a source is a ``ray.data.Dataset`` whose read tasks and functions the pool runs: filters and batch functions may return any number of
rows. Where it stops: :mod:`offload.pipeline.raydata.plan` knows Ray's plans, and :mod:`offload.pipeline.feed.tasks` cuts a pass into tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import RunError
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID, Columns, take
from offload.pipeline.index.source import At, Reader, Samples, nowhere
from offload.pipeline.order.chunks import TRAINED, whole_chunks
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import generator, mix
from offload.pipeline.order.unit_ids import UnitIds
from offload.pipeline.raydata.execution import user_ids
from offload.pipeline.raydata.unit_maker import UnitMaker, UnitSamples, expected_rows, gathered, unit_name
from offload.pipeline.work.block import Gather, Processed, Scratch, assemble
from offload.pipeline.work.processing import process
from offload.pipeline.work.recipe import Recipe
from offload.pipeline.work.transform import check_block_names
from offload.pipeline.work.watchdog import Watch

if TYPE_CHECKING:
    from offload.pipeline.raydata.runner import Chain

UNIT, DONE = "unit", "done"
"""Columns of a task: the number of a unit, and the ranges of its trained places, flat."""


@dataclass(frozen=True, kw_only=True)
class UnitIndex:
    """The units of a source.

    ``table`` has a row for each: what its chain is given, the numbers of chain and rows (:class:`offload.pipeline.raydata.plan.Unit`), and
    its label. ``samples``: their number in a pass, None if only running the source tells. ``identity`` is equal for sources with
    equal units. ``notes`` are for the user.
    """

    table: pa.Table
    chains: tuple[Chain, ...]
    samples: int | None
    identity: str
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> UnitIds:
        """The numbers of the samples."""
        return UnitIds(self.table.num_rows)


@dataclass(frozen=True, kw_only=True)
class UnitRecipe:
    """Everything that a task needs besides its units. ``inner`` transforms the samples that the chains make; ``id_column`` holds their
    ids, if the user numbers them; ``maker`` runs the chains, once this process is ready."""

    inner: Recipe
    chains: tuple[Chain, ...]
    ids: UnitIds
    shuffle: bool
    id_column: str | None = None
    maker: UnitMaker | None = None

    def ready(self) -> UnitRecipe:
        """Prepare this recipe in this process: construct the classes of its steps and of its transform.

        Raises RunError for a class that raises.
        """
        return dataclasses.replace(self, inner=self.inner.ready(), maker=UnitMaker(self.chains))

    def process(self, rows: pa.Table, *, epoch: int, scratch: Scratch, watch: Watch) -> pa.Table:
        """Return the block of these units, as :func:`offload.pipeline.work.processing.process` does for index rows."""
        given = rows.to_pylist()
        labels = [unit["label"] for unit in given]
        made: Iterable[_Unit] = (self._made(unit, epoch, watch) for unit in given)
        if self.inner.kind == "none":
            block = self._as_made(given, made, _MadeUnits(labels, []), epoch, scratch)
            watch.idle()
            return block
        units = list(made)
        index = _joined_index([self._index(number, each, epoch) for number, each in enumerate(units)], given)
        inner = dataclasses.replace(self.inner, reader=_MadeUnits(labels, [each.made for each in units]))
        return process(inner, index, epoch=epoch, scratch=scratch, watch=watch)

    def _as_made(
        self, given: Sequence[Mapping[str, Any]], made: Iterable[_Unit], held: _MadeUnits, epoch: int, scratch: Scratch
    ) -> pa.Table:
        """The block of samples that no transform takes. Those of a unit go to their places in the block before the next unit is made."""
        counts = [count for unit in given if (count := expected_rows(unit)) is not None]
        if len(counts) < len(given):
            made = list(made)
            counts = [each.made.count for each in made]
        gather, start = Gather(sum(counts), scratch), 0
        tables: list[pa.Table] = []
        parts: list[Columns] = []
        kept: list[NDArray[np.int64]] = []
        skipped: dict[int, str] = {}
        for number, unit in enumerate(made):
            table = self._index(number, unit, epoch)
            rows = table.column("row").to_numpy()
            failed = np.flatnonzero(np.isin(rows, list(unit.made.errors))) if unit.made.errors else rows[:0]
            for i in failed.tolist():
                skipped[start + i] = f"{held.describe(table, i)}: {unit.made.errors[int(rows[i])]}"
            good = np.delete(np.arange(len(rows)), failed)
            if len(good):
                check_block_names(self.inner, unit.made.columns)
                whole = self.inner.whole
                parts.append(
                    take(unit.made.columns, rows[good]) if whole else gather.place(unit.made.columns, rows[good])
                )
                kept.append(good + start)
            tables.append(table)
            start += len(rows)
        inner = dataclasses.replace(self.inner, reader=held)
        done = Processed(_joined_index(tables, given), parts, kept, skipped)
        return assemble(done, gather, inner.words, whole=inner.whole, skip=inner.on_error == "skip")

    def _made(self, unit: Mapping[str, Any], epoch: int, watch: Watch) -> _Unit:
        """Make a unit, and number its samples."""
        number, label = unit[UNIT], unit["label"]
        of = f" {self.inner.dataset!r}" if self.inner.dataset else ""
        watch.doing(lambda: f"making {unit_name(label)}{of}", None)
        assert self.maker is not None
        skip = self.inner.on_error == "skip"
        made = self.maker.make(unit, number, seed=self.inner.seed, epoch=epoch, skip=skip)
        if made.count > self.ids.most:
            raise RunError(
                f"{unit_name(label)} gives {made.count:,} rows, more than {self.ids.most:,}. Read it in more blocks (override_num_blocks)."
            )
        ids = self.ids.samples(number, np.arange(made.count, dtype=np.int64))
        if self.id_column is not None and made.count > len(made.errors):
            ids = user_ids(_with_ids(made, self.id_column, ids), self.id_column)
            columns = {name: column for name, column in made.columns.items() if name != SAMPLE_ID}
            made = dataclasses.replace(made, columns=columns)
        return _Unit(number=number, made=made, ids=ids, done=_ranges(unit[DONE]))

    def _index(self, place: int, unit: _Unit, epoch: int) -> pa.Table:
        """The index rows of a unit's samples that a task returns, and the trained rest of their chunks."""
        count = unit.made.count
        rows = np.arange(count, dtype=np.int64)
        if self.shuffle:
            rows = generator(mix(self.inner.seed, unit.number, 5), epoch).permutation(count).astype(np.int64)
        places = np.arange(count, dtype=np.int64)
        if unit.done.pairs:
            places = whole_chunks(unit.done.missing_from(count).between(0, count), count).numbers()
        rows = rows[places] if unit.done.pairs else rows
        table = pa.table(
            {
                UNIT: np.full(len(places), place, dtype=np.int32),
                "row": rows,
                SAMPLE_ID: unit.ids[rows],
                POSITION: self.ids.positions(unit.number, count, places),
            }
        )
        return table.append_column(TRAINED, pa.array(unit.done.holds(places)))


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A unit in a pass: its samples, their ids, and the places that were trained before."""

    number: int
    made: UnitSamples
    ids: NDArray[np.int64]
    done: Ranges


class _MadeUnits(Reader):
    """A reader of samples that exist already, of units with these labels. A transform may change what it reads."""

    def __init__(self, labels: Sequence[str], made: Sequence[UnitSamples]) -> None:
        self._labels, self._made = labels, made

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        units, places = rows.column(UNIT).to_numpy(), rows.column("row").to_numpy()
        return gathered(units, places, self._made.__getitem__, changed=True)

    def describe(self, rows: pa.Table, row: int) -> str:
        unit, place = rows.column(UNIT)[row].as_py(), rows.column("row")[row].as_py()
        return f"row {place} of {self._labels[unit]}"


def _joined_index(tables: Sequence[pa.Table], given: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The index rows of all units of a task."""
    index = pa.concat_tables([table for table in tables if table.num_rows] or tables[:1])
    if not any(unit[DONE] for unit in given):  # leaving rows out costs a copy of the block
        index = index.drop_columns([TRAINED])
    return index.combine_chunks()


def _with_ids(made: UnitSamples, name: str, ids: NDArray[np.int64]) -> Columns:
    """The columns, with ids for rows that failed before they had one."""
    if name not in made.columns or not made.errors:
        return made.columns
    values = [ids[row] if row in made.errors else value for row, value in enumerate(made.columns[name])]
    return {**made.columns, name: values}


def _ranges(flat: Sequence[int] | None) -> Ranges:
    flat = flat or ()
    return Ranges(tuple(zip(flat[::2], flat[1::2], strict=True)))
