"""Sources whose samples are known only once a unit of them is made, and the recipe that makes units in a preprocessing process.

Such a source is a ``ray.data.Dataset`` whose read tasks and functions the pool runs: filters and batch functions may return any number of
rows. Where it stops: :mod:`offload.ray_private.data.dataset_plan` knows Ray's plans, and :mod:`offload.pipeline.feed.tasks` cuts a pass
into tasks.
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
from offload.pipeline.preprocessing.block import Gather, Processed, Scratch, assemble
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.transform import check_block_names
from offload.pipeline.preprocessing.watchdog import Watch
from offload.pipeline.raydata.unit_maker import UnitMaker, UnitSamples, expected_rows, gathered, unit_name

if TYPE_CHECKING:
    from offload.pipeline.raydata.runner import Chain

UNIT, DONE = "unit", "done"
"""Columns of a task: the number of a unit, and the ranges of its trained places, flat."""


@dataclass(frozen=True, kw_only=True)
class UnitIndex:
    """The units of a source.

    Args:
        table: a row for each unit, with the fields of :class:`offload.ray_private.data.drafts.Unit` that a task needs.
        chains: the steps of units, by the column ``chain``.
        samples: the samples of a pass. None: only running the source tells.
        identity: equal for sources with equal units.
        notes: sentences for the user.
    """

    table: pa.Table
    chains: tuple[Chain, ...]
    samples: int | None
    identity: str
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> UnitIds:
        """The numbers for its samples."""
        return UnitIds(self.table.num_rows)


@dataclass(frozen=True, kw_only=True)
class UnitRecipe:
    """Everything that a task needs besides its units.

    Args:
        inner: the recipe that transforms the samples of units.
        chains: the steps of units.
        ids: numbers for the samples.
        shuffle: whether the samples of a unit come in random order.
        id_column: the column of the user's own ids, if there is one.
        maker: runs the chains, once this process is ready.
    """

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
        """Return the block of these units, as :func:`offload.pipeline.preprocessing.processing.process` does for index rows."""
        orders = rows.to_pylist()
        labels = [order["label"] for order in orders]
        # One after the other: without a transform, a unit's own memory is free again before the next one is made.
        coming: Iterable[_Unit] = (self._make(order, epoch, watch) for order in orders)
        if self.inner.kind == "none":
            block = self._untransformed(orders, coming, _MadeUnits(labels, []), epoch, scratch)
            watch.idle()
            return block
        units = list(coming)
        index = _joined_index([self._index(number, unit, epoch) for number, unit in enumerate(units)], orders)
        inner = dataclasses.replace(self.inner, reader=_MadeUnits(labels, [unit.samples for unit in units]))
        return process(inner, index, epoch=epoch, scratch=scratch, watch=watch)

    def _untransformed(
        self,
        orders: Sequence[Mapping[str, Any]],
        units: Iterable[_Unit],
        held: _MadeUnits,
        epoch: int,
        scratch: Scratch,
    ) -> pa.Table:
        """The block of samples without a transform. A unit's samples go to their places in the block before the next unit is made."""
        counts = [count for order in orders if (count := expected_rows(order)) is not None]
        if len(counts) < len(orders):
            units = list(units)
            counts = [unit.samples.count for unit in units]
        gather, start = Gather(sum(counts), scratch), 0
        tables: list[pa.Table] = []
        parts: list[Columns] = []
        places: list[NDArray[np.int64]] = []
        skipped: dict[int, str] = {}
        for number, unit in enumerate(units):
            table = self._index(number, unit, epoch)
            rows = table.column("row").to_numpy()
            failed = np.flatnonzero(np.isin(rows, list(unit.samples.errors))) if unit.samples.errors else rows[:0]
            for i in failed.tolist():
                skipped[start + i] = f"{held.describe(table, i)}: {unit.samples.errors[int(rows[i])]}"
            good = np.delete(np.arange(len(rows)), failed)
            if len(good):
                check_block_names(self.inner, unit.samples.columns)
                whole = self.inner.whole
                parts.append(
                    take(unit.samples.columns, rows[good]) if whole else gather.place(unit.samples.columns, rows[good])
                )
                places.append(good + start)
            tables.append(table)
            start += len(rows)
        inner = dataclasses.replace(self.inner, reader=held)
        done = Processed(_joined_index(tables, orders), parts, places, skipped)
        return assemble(done, gather, inner.words, whole=inner.whole, skip=inner.on_error == "skip")

    def _make(self, order: Mapping[str, Any], epoch: int, watch: Watch) -> _Unit:
        """Make the unit of a task's row, and number its samples."""
        number, label = order[UNIT], order["label"]
        of = f" {self.inner.dataset!r}" if self.inner.dataset else ""
        watch.doing(lambda: f"making {unit_name(label)}{of}", None)
        assert self.maker is not None
        skip = self.inner.on_error == "skip"
        samples = self.maker.make(order, number, seed=self.inner.seed, epoch=epoch, skip=skip)
        if samples.count > self.ids.most:
            raise RunError(
                f"{unit_name(label)} gives {samples.count:,} rows, more than {self.ids.most:,}. Read it in more blocks "
                "(override_num_blocks)."
            )
        ids = self.ids.samples(number, np.arange(samples.count, dtype=np.int64))
        if self.id_column is not None and samples.count > len(samples.errors):
            ids = user_ids(_with_ids(samples, self.id_column, ids), self.id_column)
            columns = {name: column for name, column in samples.columns.items() if name != SAMPLE_ID}
            samples = dataclasses.replace(samples, columns=columns)
        return _Unit(number=number, samples=samples, ids=ids, done=_ranges(order[DONE]))

    def _index(self, place: int, unit: _Unit, epoch: int) -> pa.Table:
        """The index rows of a unit's samples that a task returns, and the trained rest of their chunks."""
        count = unit.samples.count
        rows = np.arange(count, dtype=np.int64)
        if self.shuffle:
            # The number 5 sets this use of the seed apart: others seed the unit's steps and its samples.
            rows = generator(mix(self.inner.seed, unit.number, 5), epoch).permutation(count).astype(np.int64)
        places = np.arange(count, dtype=np.int64)
        if unit.done.pairs:
            # Whole chunks, since only these draw the same random numbers again.
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
    samples: UnitSamples
    ids: NDArray[np.int64]
    done: Ranges


class _MadeUnits(Reader):
    """A reader of samples that exist already, of units with these labels. A transform may change its results."""

    def __init__(self, labels: Sequence[str], samples: Sequence[UnitSamples]) -> None:
        self._labels, self._samples = labels, samples

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        units, places = rows.column(UNIT).to_numpy(), rows.column("row").to_numpy()
        return gathered(units, places, self._samples.__getitem__, changed=True)

    def describe(self, rows: pa.Table, row: int) -> str:
        unit, place = rows.column(UNIT)[row].as_py(), rows.column("row")[row].as_py()
        return f"row {place} of {self._labels[unit]}"


def _joined_index(tables: Sequence[pa.Table], orders: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The index rows of all units of a task."""
    index = pa.concat_tables([table for table in tables if table.num_rows] or tables[:1])
    if not any(order[DONE] for order in orders):  # leaving rows out would cost a copy of the block
        index = index.drop_columns([TRAINED])
    return index.combine_chunks()


def _with_ids(samples: UnitSamples, name: str, ids: NDArray[np.int64]) -> Columns:
    """The columns, with ids for rows that failed before they had an id."""
    if name not in samples.columns or not samples.errors:
        return samples.columns
    values = [ids[row] if row in samples.errors else value for row, value in enumerate(samples.columns[name])]
    return {**samples.columns, name: values}


def _ranges(flat: Sequence[int] | None) -> Ranges:
    flat = flat or ()
    return Ranges(tuple(zip(flat[::2], flat[1::2], strict=True)))


def user_ids(columns: Columns, id_column: str) -> np.ndarray[Any, Any]:
    """The ids that the user gave to samples. Raises RunError if the column does not exist, or holds other things than integers."""
    if id_column not in columns:
        raise RunError(
            f"the data set has no column {id_column!r}, which from_ray(id_column=...) names; its columns are "
            f"{', '.join(columns)}."
        )
    ids = np.asarray(columns[id_column])
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise RunError(
            f"the id_column {id_column!r} must hold integers, found {ids.dtype}: number the samples instead."
        )
    return ids.astype(np.int64)
