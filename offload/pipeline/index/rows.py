"""The rows of an index: a table with a row for each sample, runs of samples, which take memory for each run alone, or rows in files.

A task holds its rows as :class:`Picked`: their ids, until it travels. The process that runs it makes a table of them: readers see tables
alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.index.stored_rows import StoredRows
from offload.pipeline.order.chunks import TRAINED, untrained
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import Consecutive

Numbers = NDArray[np.integer[Any]]

_AT_ONCE = 1024  # ids that are compared with a run's bounds at once


@dataclass(frozen=True, eq=False)
class Runs:
    """Samples in runs, such as the rows of Parquet's row groups: all samples of a run have its columns, and differ by their number in it.

    Args:
        table: a row for each run.
        counts: the samples of each run.
        number: the column with a sample's number in its run, from 0 on.
    """

    table: pa.Table
    counts: NDArray[np.int64]
    number: str = "row"

    @functools.cached_property
    def _stops(self) -> NDArray[np.int64]:
        stops: NDArray[np.int64] = np.cumsum(self.counts)
        return stops

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def rows_at(self, ids: Numbers) -> pa.Table:
        """The index rows of these samples, in this order. The columns of runs are dictionaries."""
        return self.runs_at(ids).rows(ids)

    def runs_at(self, ids: Numbers) -> SampleRuns:
        """The runs of these samples."""
        run, lengths = self._runs_of(ids)
        # Only these runs travel with the task, not the whole index.
        visited, which = np.unique(run, return_inverse=True)
        return SampleRuns(
            table=self.table.take(pa.array(visited)).combine_chunks(),
            first=self._stops[visited] - self.counts[visited],
            which=which.astype(np.int32),
            lengths=lengths,
            number=self.number,
        )

    @property
    def groups(self) -> Consecutive:
        """The run of each sample."""
        return Consecutive(self.counts)

    def _runs_of(self, ids: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The runs of these ids, and how many ids in a row belong to each."""
        # Most orders visit run after run. Finding the run of each id would take several times as long.
        blocks = ids[: len(ids) // _AT_ONCE * _AT_ONCE].reshape(-1, _AT_ONCE)
        low, high = (
            np.searchsorted(self._stops, ends, side="right") for ends in (blocks.min(axis=1), blocks.max(axis=1))
        )
        looked_at = np.full(len(ids), True)
        looked_at[: blocks.size].reshape(-1, _AT_ONCE)[low == high, 1:] = False
        places = np.flatnonzero(looked_at)
        run = np.searchsorted(self._stops, ids[places], side="right")
        begins = np.flatnonzero(np.diff(run, prepend=-1))
        return run[begins], np.diff(places[begins], append=len(ids))


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleRuns:
    """The runs of some samples, in the order of the samples: stretch ``i`` holds ``lengths[i]`` samples of run ``which[i]``.

    Args:
        table: a row for each run.
        first: the id of each run's first sample.
        which: the run of each stretch of samples in a row.
        lengths: the samples of each stretch.
        number: the column with a sample's number in its run.
    """

    table: pa.Table
    first: NDArray[np.int64]
    which: NDArray[np.int32]
    lengths: NDArray[np.int64]
    number: str

    def rows(self, ids: Numbers) -> pa.Table:
        """The index rows of the samples, whose ids these are."""
        run = pa.array(np.repeat(self.which, self.lengths))
        columns = {
            name: pa.DictionaryArray.from_arrays(run, self.table.column(name).combine_chunks())
            for name in self.table.column_names
        }
        inside = ids - np.repeat(self.first[self.which], self.lengths)
        return pa.table({**columns, self.number: inside})


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The index rows of some samples, in their order."""

    table: pa.Table

    def rows(self, ids: Numbers) -> pa.Table:
        """The index rows of the samples, whose ids these are."""
        return self.table


class Joined(Protocol):
    """The rows of several sources as one (:class:`offload.pipeline.index.mixed.MixedRows`)."""

    def __len__(self) -> int:
        """The number of samples."""

    def rows_at(self, ids: Numbers) -> pa.Table:
        """The index rows of these samples, in this order."""

    def open(self) -> None:
        """As :meth:`StoredRows.open`."""

    def close(self) -> None:
        """As :meth:`StoredRows.close`."""


IndexRows: TypeAlias = pa.Table | Runs | StoredRows | Joined


def rows_at(rows: IndexRows, ids: Numbers) -> pa.Table:
    """The index rows of these samples, in this order."""
    return _known_of(rows, ids).rows(ids)


def whole(rows: IndexRows) -> pa.Table:
    """The index rows of all samples, as a table, which may take much memory."""
    if isinstance(rows, pa.Table):
        return rows
    return rows.table if isinstance(rows, StoredRows) else rows.rows_at(np.arange(len(rows)))


def open_rows(rows: IndexRows) -> None:
    """Get ready to take rows. Raises RunError if that is impossible."""
    if not isinstance(rows, pa.Table | Runs):
        rows.open()


def close_rows(rows: IndexRows) -> None:
    """Remove what the rows keep on disk for this run alone."""
    if not isinstance(rows, pa.Table | Runs):
        rows.close()


def _known_of(rows: IndexRows, ids: Numbers) -> SampleRuns | SampleRows:
    """What an index knows about these samples, in the form in which it travels."""
    if isinstance(rows, Runs):
        return rows.runs_at(ids)
    return SampleRows(_of_table(rows, ids) if isinstance(rows, pa.Table) else rows.rows_at(ids))


def _of_table(rows: pa.Table, ids: Numbers) -> pa.Table:
    table = rows.take(pa.array(ids))
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):  # it would travel whole with every task
            table = table.set_column(place, field.name, table.column(place).cast(field.type.value_type))
    return table.combine_chunks()


@dataclass(frozen=True, eq=False, kw_only=True)
class Picked:
    """Index rows of a task. It travels with what the index knows about the samples, and holds their ids alone until then: a pass keeps
    every task until its end.

    Args:
        ids: the sample ids, in the order of the pass.
        source: the index; on the way and where the task runs, what it knows about the samples.
        positions: the positions in the pass.
        wanted: those of them that the task returns; it only processes the others (:data:`offload.pipeline.order.chunks.TRAINED`).
    """

    ids: Numbers
    source: IndexRows | SampleRuns | SampleRows
    positions: Ranges
    wanted: Ranges

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": self._known()}

    def _known(self) -> SampleRuns | SampleRows:
        source = self.source
        return source if isinstance(source, SampleRuns | SampleRows) else _known_of(source, self.ids)

    @property
    def num_rows(self) -> int:
        """The number of samples that the task processes."""
        return len(self.ids)

    def table(self) -> pa.Table:
        """The index rows, with the columns that every task needs."""
        rows = self._known().rows(self.ids)
        positions = self.positions.numbers()
        ids = pa.array(self.ids.astype(np.int64, copy=False))
        rows = rows.append_column(SAMPLE_ID, ids).append_column(POSITION, pa.array(positions))
        if self.wanted != self.positions:
            rows = rows.append_column(TRAINED, pa.array(~self.wanted.holds(positions)))
        return rows

    def returned(self) -> pa.Table:
        """The index rows of the samples that the task returns."""
        rows = self.table()
        return rows.take(untrained(rows))


def as_table(rows: pa.Table | Picked) -> pa.Table:
    """A task's index rows as a table."""
    return rows.table() if isinstance(rows, Picked) else rows
