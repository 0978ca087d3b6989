"""Several sources as one: the index of all their samples, and a reader that hands each row to the reader of its source.

Where it stops: :mod:`offload.pipeline.describe.combine` checks what a user mixes, and a recipe transforms the samples of each part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import RunError
from offload.pipeline.blocks.whole_samples import SAMPLES, rows_of
from offload.pipeline.blocks.wire import Column, Columns, as_array, common_dtype
from offload.pipeline.index.rows import IndexRows, Numbers, close_rows, open_rows, rows_at
from offload.pipeline.index.source import At, Index, Reader, Samples, nowhere
from offload.pipeline.order.shuffling import Consecutive, Groups, mix

PART = "__part__"
"""The column of index rows with the number of a row's part. The part's own columns are called ``NUMBER/NAME``."""

PartRows = tuple[NDArray[np.int64], Columns, Mapping[int, str]]
"""(the rows that could be read, their columns, the errors of the other rows)"""


class MixedPart(Protocol):
    """A part of a mixed data set: its reader, or its recipe."""

    @property
    def members_vary(self) -> bool:
        """Whether samples may lack columns that others have."""


_OF_A_PART = re.compile(r"\d+/")
_Part = TypeVar("_Part", bound=MixedPart)


@dataclass(frozen=True, kw_only=True)
class MixedIndex(Index):
    """The index of all parts, one after the other, and the index of each."""

    parts: tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class MixedRows:
    """The rows of all parts, one after the other, each kept as its source keeps it."""

    parts: tuple[IndexRows, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def rows_at(self, ids: Numbers) -> pa.Table:
        """The index rows of these samples, in this order, with the columns of all parts."""
        stops = np.cumsum([len(part) for part in self.parts])
        numbers = np.searchsorted(stops, ids, side="right")
        tables, places = [], []
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(numbers == number)
            table = rows_at(part, ids[mine].astype(np.int64) - (stops[number] - len(part)))
            table = table.rename_columns([f"{number}/{column}" for column in table.column_names])
            tables.append(table.append_column(PART, pa.array(np.full(len(table), number, dtype=np.int16))))
            places.append(mine)
        return rows_at(pa.concat_tables(tables, promote_options="default"), np.argsort(np.concatenate(places)))

    def open(self) -> None:
        """See :func:`offload.pipeline.index.rows.open_rows`."""
        for part in self.parts:
            open_rows(part)

    def close(self) -> None:
        """See :func:`offload.pipeline.index.rows.close_rows`."""
        for part in self.parts:
            close_rows(part)


def mixed_index(name: str, parts: Mapping[str, Index]) -> MixedIndex:
    """The samples of all parts: the first sample of a part has the id after the last one of the part before."""
    indexes = tuple(parts.values())
    first = indexes[0].classes
    return MixedIndex(
        name=name,
        rows=MixedRows(tuple(index.rows for index in indexes)),
        reader=MixedReader(tuple(parts), tuple(index.reader for index in indexes)),
        groups=_groups(indexes),
        classes=first if all(index.classes == first for index in indexes) else (),
        parts=indexes,
        identity=_identity(indexes),
    )


def _groups(indexes: Sequence[Index]) -> Groups | None:
    """The groups of all parts, numbered through. A sample of a part without groups is a group of its own."""
    if all(index.groups is None for index in indexes):
        return None
    runs = [index.groups.counts for index in indexes if isinstance(index.groups, Consecutive)]
    if len(runs) == len(indexes):
        return Consecutive(np.concatenate(runs))
    numbered, used = [], 0
    for index in indexes:
        groups = np.arange(len(index.rows), dtype=np.int64) if index.groups is None else index.groups
        groups = groups.each() if isinstance(groups, Consecutive) else groups
        numbered.append(groups + used)
        used += int(groups.max(initial=-1)) + 1
    return np.concatenate(numbered)


def _identity(indexes: Sequence[Index]) -> str | None:
    if all(index.identity is None for index in indexes):
        return None
    return "+".join(index.identity or str(len(index.rows)) for index in indexes)


class MixedReader(Reader):
    """A reader of the rows of several sources."""

    def __init__(self, names: tuple[str, ...], readers: tuple[Reader, ...]) -> None:
        self.names, self.readers = names, readers

    def begin_pass(self, seed: int, epoch: int) -> None:
        """Seed the readers that draw random numbers of their own, each differently."""
        for number, reader in enumerate(self.readers):
            reader.begin_pass(mix(seed, number), epoch)

    def begin(self, rows: pa.Table, epoch: int) -> None:
        """Begin a task over these index rows."""
        numbers = rows.column(PART).to_numpy()
        for number, reader in enumerate(self.readers):
            if type(reader).begin is not Reader.begin:  # otherwise, nobody would look at the copy of its rows
                reader.begin(_own(rows, np.flatnonzero(numbers == number), number), epoch)

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        def part(reader: Reader, own: pa.Table) -> PartRows:
            samples = reader.read(own)
            return np.arange(len(own)), samples.columns, samples.errors

        _, columns, errors = in_parts(self.readers, rows, part, self.names)
        return Samples(columns, dict(errors))

    def describe(self, rows: pa.Table, row: int) -> str:
        number = rows.column(PART)[row].as_py()
        return str(self.readers[number].describe(_own(rows, [row], number), 0))


def in_parts(
    parts: Sequence[_Part], rows: pa.Table, work: Callable[[_Part, pa.Table], PartRows], names: Sequence[str]
) -> PartRows:
    """Do the work of each part on its own rows, and put the results into the order of ``rows``.

    Raises RunError if the samples of two parts have different columns. Samples of tar shards hold None for those that they lack.
    """
    numbers = rows.column(PART).to_numpy()
    done: list[tuple[int, NDArray[np.int64], Columns]] = []
    errors: dict[int, str] = {}
    for number in np.unique(numbers).tolist():
        mine = np.flatnonzero(numbers == number)
        good, columns, bad = work(parts[number], _own(rows, mine, number))
        errors.update((int(mine[row]), reason) for row, reason in bad.items())
        if len(good):
            done.append((number, mine[good], columns))
    if not done:
        return np.zeros(0, dtype=np.int64), {}, errors
    if any(
        SAMPLES in columns for _, _, columns in done
    ):  # samples of one part stay as its data set returns them, for a collate_fn
        done = [(number, at, {SAMPLES: rows_of(columns, len(at))}) for number, at, columns in done]
    names_of_all = dict.fromkeys(name for _, _, columns in done for name in columns)
    done = [
        (number, at, {name: columns.get(name, [None] * len(at)) for name in names_of_all})
        if parts[number].members_vary
        else (number, at, columns)
        for number, at, columns in done
    ]
    first = done[0]
    for other in done[1:]:
        if other[2].keys() != first[2].keys():
            raise RunError(
                f"the data sets of mix have different columns: {names[first[0]]!r} gives {_listed(first[2])}, and "
                f"{names[other[0]]!r} gives {_listed(other[2])}. Return the same columns from the transform of each."
            )
    if len(done) == 1:
        return first[1], first[2], errors
    places = np.concatenate([at for _, at, _ in done])
    order = np.argsort(places)
    merged = {name: _merged([columns[name] for _, _, columns in done], order) for name in first[2]}
    return places[order], merged, errors


def _own(rows: pa.Table, at: Sequence[int] | NDArray[np.int64], number: int) -> pa.Table:
    """These rows of a part, as its reader knows them, with the columns that the feed adds to every row."""
    prefix = f"{number}/"
    names = [name for name in rows.column_names if name.startswith(prefix)]
    added = [name for name in rows.column_names if name != PART and not _OF_A_PART.match(name)]
    own = rows.select([*names, *added]).take(pa.array(at, pa.int64()))
    return own.rename_columns([*(name.removeprefix(prefix) for name in names), *added])


def _merged(parts: Sequence[Column], order: NDArray[np.int64]) -> Column:
    """The rows of these columns in this order: as an array if all are arrays of one shape and of types with a common one."""
    arrays = [as_array(part) for part in parts if hasattr(part, "dtype")]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        dtype = common_dtype(array.dtype for array in arrays)
        if dtype is not None:
            return np.concatenate(arrays, dtype=dtype)[order]
    values: list[Any] = [value for part in parts for value in part]
    return [values[i] for i in order.tolist()]


def _listed(columns: Columns) -> str:
    return ", ".join(map(str, columns)) or "none"
