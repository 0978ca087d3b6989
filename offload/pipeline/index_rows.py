"""The rows of an index: a table with a row for each sample, or runs of samples, which take memory for each run alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.pipeline.shuffling import Consecutive

Numbers = NDArray[np.integer[Any]]


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

    def take(self, ids: Numbers) -> pa.Table:
        """The index rows of these samples, in this order."""
        run = np.searchsorted(self._stops, ids, side="right")
        inside = ids.astype(np.int64) - (self._stops[run] - self.counts[run])
        return self.table.take(pa.array(run)).append_column(self.number, pa.array(inside))

    def whole(self) -> pa.Table:
        """The index rows of all samples, as a table."""
        return self.take(np.arange(len(self)))

    @property
    def groups(self) -> Consecutive:
        """The run of each sample."""
        return Consecutive(self.counts)


IndexRows: TypeAlias = pa.Table | Runs


def rows_at(rows: IndexRows, ids: Numbers) -> pa.Table:
    """The index rows of these samples, in this order."""
    if isinstance(rows, Runs):
        return rows.take(ids)
    taken = rows.take(pa.array(ids))
    for place, field in enumerate(taken.schema):
        if pa.types.is_dictionary(field.type):  # which would travel whole with every task
            taken = taken.set_column(place, field.name, taken.column(place).cast(field.type.value_type))
    return taken
