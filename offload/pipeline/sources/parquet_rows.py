"""The rows of Parquet tables: in the order of a task, and with the same columns, of one type each, for all files.

A task visits the rows of a row group in random order, some thousand rows a call. If each call took its own, it would read most of the
row group from memory again, so a task picks all its rows of a row group at once (:class:`Stretches`). pandas writes integers as floats
where some are missing, so all files' types are merged. Where it stops: :mod:`offload.pipeline.sources.parquet` reads row groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import ConfigError, RunError
from offload.pipeline.blocks.wire import Column, Columns, decode, is_whole, stack_lists

MOST_BYTES = 16 << 20
"""The largest row group whose rows are picked at once. A copy of a larger one would fit in no cache, and need much memory."""

Places = NDArray[np.int64]


class Stretches:
    """The stretches of a task: rows of one row group each, in the order of the task. It holds the rows of one stretch.

    Args:
        stretches: for each, its row group and the places of its rows in it.
    """

    def __init__(self, stretches: Iterable[tuple[Any, Places]] = ()) -> None:
        self._coming = deque(stretches)
        self._held: tuple[Any, Places, TableRows] | None = None
        self._at = 0  # where the next call should begin

    def rows(self, group: Any, places: Places, read: Callable[[], pa.Table]) -> TableRows:
        """The rows at these places of a group, which ``read`` reads. They may be any rows, in any order."""
        if self._held is None or self._held[0] != group:
            self._hold_next(group, read)
        if self._held is not None and self._held[0] == group and (at := self._find(places)) is not None:
            self._at = at + len(places)
            return self._held[2].slice(at, len(places))
        return TableRows(read().take(pa.array(places)))

    def _hold_next(self, group: Any, read: Callable[[], pa.Table]) -> None:
        """Pick the rows of the next stretch of a group, if there is one."""
        skip = next((number for number, (coming, _) in enumerate(self._coming) if coming == group), None)
        if skip is None:
            return
        for _ in range(skip):
            self._coming.popleft()
        _, places = self._coming.popleft()
        self._held, self._at = None, 0
        table = read()
        if len(places) > 1 and table.nbytes <= MOST_BYTES:
            self._held = group, places, TableRows(table.take(pa.array(places)))

    def _find(self, places: Places) -> int | None:
        """Where these places begin in the stretch. None if they do not follow one another there."""
        assert self._held is not None
        held = self._held[1]
        if np.array_equal(held[self._at : self._at + len(places)], places):
            return self._at
        # Out of turn: search the whole stretch, which takes longer.
        at = int(np.argmax(held == places[0]))
        return at if np.array_equal(held[at : at + len(places)], places) else None


class TableRows:
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

    def slice(self, start: int, count: int) -> TableRows:
        """Some of the rows."""
        return TableRows(self._table, self._arrays, self._start + start, count)

    def table(self) -> pa.Table:
        """The rows as a table."""
        return self._table.slice(self._start, self._count)

    def columns(self) -> Columns:
        """The columns of the rows: lists, and arrays that are either read-only or the caller's own."""
        rest = [name for name in self._table.column_names if name not in self._arrays]
        lists = _listed(self._table.select(rest).slice(self._start, self._count)) if rest else {}
        rows = slice(self._start, self._start + self._count)
        return {
            name: _unshared(self._arrays[name][rows]) if name in self._arrays else lists[name]
            for name in self._table.column_names
        }


def columns_of(pieces: Sequence[TableRows]) -> Columns:
    """The columns of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0].columns()
    # Files may hold their columns in different orders.
    return _listed(pa.concat_tables([piece.table() for piece in pieces], promote_options="default").combine_chunks())


def _unshared(column: Column) -> Column:
    """A copy of the column if it is writable, since later calls need its values unchanged.

    Arrow makes writable arrays of booleans, dates, and floats of which some are missing.
    """
    return column.copy() if isinstance(column, np.ndarray) and column.flags.writeable else column


def _listed(table: pa.Table) -> Columns:
    decoded = decode(table, foreign=True).items()
    return {name: stack_lists(name, column) if isinstance(column, list) else column for name, column in decoded}


Types = Mapping[str, pa.DataType]
"""The type of each column by name."""


def types_of(schema: pa.Schema, columns: Iterable[str] | None) -> Types:
    """The types of these columns (None: of all) once they are read: categories as their values, and views as what they show."""
    names = schema.names if columns is None else columns
    return {name: _plain(schema.field(name).type) for name in names if schema.get_field_index(name) >= 0}


def common_types(files: Sequence[tuple[str, Types]]) -> Types:
    """The types that hold the values of all files, for the columns whose types differ between files or that some files lack.

    Raises ConfigError if a column has no such type.
    """
    first: dict[str, tuple[str, pa.DataType]] = {}
    common: dict[str, pa.DataType] = {}
    for file, types in files:
        for name, kind in types.items():
            earlier, known = first.setdefault(name, (file, kind))
            if kind == (so_far := common.get(name, known)):
                continue
            try:
                common[name] = _merged(so_far, kind)
            except pa.ArrowException:
                raise ConfigError(
                    f"column {name!r} is {known} in {earlier!r} and {kind} in {file!r}. Write both files with one type, or name "
                    "the columns to read without it: parquet(columns=[...])."
                ) from None
    lacked = {name: kind for name, (_, kind) in first.items() if any(name not in types for _, types in files)}
    return {**lacked, **common}


def cast(table: pa.Table, types: Types, file: str) -> pa.Table:
    """The table of a file with these types, and with values in place of categories and views.

    Raises RunError for a value outside its type.
    """
    for number, field in enumerate(table.schema):
        kind = types.get(field.name, _plain(field.type))
        if field.type == kind:
            continue
        try:
            # As in NumPy, a large integer among floats is rounded.
            column = table.column(number).cast(kind, safe=not pa.types.is_floating(kind))
        except pa.ArrowException as error:
            raise RunError(
                f"column {field.name!r} of {file!r} cannot become {kind}, which its other files need: {error}. Write all files "
                "with one type."
            ) from None
        table = table.set_column(number, field.name, column)
    return table


def completed(table: pa.Table, types: Types) -> pa.Table:
    """The table with all columns of ``types``. Those that this file lacks hold nulls."""
    for name, kind in types.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
    return table


_OF_VIEWS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
"""DataFusion and delta-rs write columns of such types, and Arrow cannot take rows of them."""


def _plain(kind: pa.DataType) -> pa.DataType:
    return _without_views(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct(
            [field.with_type(_without_views(field.type)) for field in map(kind.field, range(kind.num_fields))]
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_field.with_type(_without_views(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        return pa.list_(inner) if pa.types.is_list(kind) else pa.large_list(inner)
    return _OF_VIEWS.get(str(kind), kind)


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    schemas = [pa.schema([("", one)]), pa.schema([("", other)])]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
