"""The rows of a table in the order of a task, taken from each row group at once.

A task visits the rows of a row group in random order, some thousand rows a call. If each call took its own, it would read most of the
row group from memory again. Where it stops: :mod:`offload.pipeline.sources.parquet` reads row groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.pipeline.wire import Column, Columns, decode, is_whole, stack_lists

MOST_BYTES = 16 << 20
"""The largest row group whose rows are taken at once. The copy of a larger one would fit in no cache, and take much memory."""

Places = NDArray[np.int64]


class Stretches:
    """The stretches of a task: rows of one row group each, in the order of the task. It holds the rows of one.

    Args:
        stretches: the group of each, and the places of its rows.
    """

    def __init__(self, stretches: Iterable[tuple[Any, Places]] = ()) -> None:
        self._coming = deque(stretches)
        self._held: tuple[Any, Places, Rows] | None = None
        self._at = 0  # where the next call should begin

    def rows(self, group: Any, places: Places, read: Callable[[], pa.Table]) -> Rows:
        """The rows at these places of a group, which ``read`` reads. They may be any rows, in any order."""
        if self._held is None or self._held[0] != group:
            self._take(group, read)
        if self._held is not None and self._held[0] == group and (at := self._find(places)) is not None:
            self._at = at + len(places)
            return self._held[2].slice(at, len(places))
        return Rows(read().take(pa.array(places)))

    def _take(self, group: Any, read: Callable[[], pa.Table]) -> None:
        """Take the rows of the next stretch of a group, if there is one."""
        skip = next((number for number, (each, _) in enumerate(self._coming) if each == group), None)
        if skip is None:
            return
        for _ in range(skip):
            self._coming.popleft()
        _, places = self._coming.popleft()
        self._held, self._at = None, 0
        table = read()
        if len(places) > 1 and table.nbytes <= MOST_BYTES:
            self._held = group, places, Rows(table.take(pa.array(places)))

    def _find(self, places: Places) -> int | None:
        """Where these places are in the stretch; None if they are not, one after the other."""
        assert self._held is not None
        held = self._held[1]
        if np.array_equal(held[self._at : self._at + len(places)], places):
            return self._at
        # Looking through the whole stretch takes longer.
        at = int(np.argmax(held == places[0]))
        return at if np.array_equal(held[at : at + len(places)], places) else None


class Rows:
    """Some rows of a table, with the columns that are arrays already. Slices are views."""

    def __init__(
        self, table: pa.Table, arrays: Columns | None = None, start: int = 0, count: int | None = None
    ) -> None:
        self._table, self._start = table, start
        self._count = table.num_rows if count is None else count
        if arrays is None:
            whole = [name for name in table.column_names if is_whole(table.column(name))]
            arrays = decode(table.select(whole), foreign=True)
        self._arrays = arrays

    def slice(self, start: int, count: int) -> Rows:
        """Some of the rows."""
        return Rows(self._table, self._arrays, self._start + start, count)

    def table(self) -> pa.Table:
        """The rows as a table."""
        return self._table.slice(self._start, self._count)

    def columns(self) -> Columns:
        """The columns of the rows: lists, and arrays that cannot be written to or are the caller's own."""
        rest = [name for name in self._table.column_names if name not in self._arrays]
        found = _listed(self._table.select(rest).slice(self._start, self._count)) if rest else {}
        rows = slice(self._start, self._start + self._count)
        return {
            name: _unshared(self._arrays[name][rows]) if name in self._arrays else found[name]
            for name in self._table.column_names
        }


def columns_of(pieces: Sequence[Rows]) -> Columns:
    """The columns of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0].columns()
    # Files may hold their columns in different orders.
    return _listed(pa.concat_tables([piece.table() for piece in pieces], promote_options="default").combine_chunks())


def _unshared(column: Column) -> Column:
    """A copy of what can be written to, since later calls need it as it is. Arrow makes such arrays of booleans, of dates, and of floats
    some of which are missing."""
    return column.copy() if isinstance(column, np.ndarray) and column.flags.writeable else column


def _listed(table: pa.Table) -> Columns:
    decoded = decode(table, foreign=True).items()
    return {name: stack_lists(name, column) if isinstance(column, list) else column for name, column in decoded}
