"""The block of a task: the chunks that it has made, joined, with what may travel to a worker and what may not.

Blocks are tens of MB. Stacking all rows at the end would read each row from memory again, and write each block to pages that the
kernel has to clear first: 5 % of the time of decoding and cropping a JPEG. So the rows go to reused memory (:class:`Gather`) while they
are still in the core's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.wire import (
    ERROR,
    POSITION,
    SAMPLE_ID,
    Array,
    Column,
    Columns,
    RaggedError,
    UnsendableError,
    as_array,
    take,
)
from offload.pipeline.order.chunks import TRAINED, untrained
from offload.pipeline.preprocessing.wording import Words

Rows: TypeAlias = NDArray[np.integer[Any]]
"""Numbers of rows."""


class Scratch:
    """Memory for one block at a time, reused from block to block. Finish with one block before you fill the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def rows(self, name: str, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Uninitialised ``(rows, *shape)`` of a dtype."""
        kept = self._kept.get(name)
        # Memory grows and never shrinks: tasks of one data set have about the same size.
        if kept is None or len(kept) < rows or kept.shape[1:] != shape or kept.dtype != dtype:
            kept = self._kept[name] = np.empty((rows, *shape), dtype)
        return kept[:rows]


class Gather:
    """The columns of a block, collected chunk by chunk."""

    def __init__(self, rows: int, scratch: Scratch) -> None:
        self._rows, self._scratch = rows, scratch
        self._into: dict[str, Array] = {}
        self._filled: dict[str, int] = {}
        self._odd: set[str] = set()

    def place(self, columns: Columns, rows: Rows | None = None) -> Columns:
        """The same columns, or these ``rows`` of them, with arrays copied to their place in the block."""
        return {name: self._place(name, column, rows) for name, column in columns.items()}

    def whole(self, name: str, rows: int) -> Array | None:
        """The whole column, if all its ``rows`` rows are in place."""
        return self._into[name][:rows] if self._filled.get(name) == rows else None

    def _place(self, name: str, column: Column, numbers: Rows | None) -> Column:
        rows = _alike(column) if name not in self._odd else None
        if rows is None:
            return self._left(name, column, numbers)
        first = rows[0]
        into = self._into.get(name)
        if into is None:
            into = self._into[name] = self._scratch.rows(name, self._rows, first.shape, first.dtype)
        elif into.shape[1:] != first.shape or into.dtype != first.dtype:
            return self._left(name, column, numbers)
        start = self._filled.get(name, 0)
        stop = start + (len(rows) if numbers is None else len(numbers))
        if stop > len(into):
            return self._left(name, column, numbers)
        place = into[start:stop]
        if not isinstance(rows, np.ndarray):
            np.stack(rows if numbers is None else [rows[i] for i in numbers], out=place)
        elif numbers is None:
            place[:] = rows
        else:
            np.take(
                rows, numbers, axis=0, out=place, mode="clip"
            )  # the mode "raise" would take them to other memory first
        self._filled[name] = stop
        return place

    def _left(self, name: str, column: Column, numbers: Rows | None) -> Column:
        """A column without a place."""
        # For the rest of the task: its rows are stacked at the end instead.
        self._odd.add(name)
        return column if numbers is None else take({name: column}, numbers)[name]


def _alike(column: Column) -> Array | Sequence[Array] | None:
    """The rows, if they are arrays of one shape and numeric type. Plain numbers are not worth the effort."""
    try:
        if isinstance(column, np.ndarray):
            column = as_array(column)
            return column if column.ndim > 1 and column.dtype.kind in "biuf" and len(column) else None
        if not len(column) or not all(hasattr(row, "shape") for row in column):
            return None
        rows = [as_array(row) for row in column]
    except Exception:  # a row is not an array after all: stacking the rows raises an error that names it
        return None
    first = rows[0]
    if first.ndim == 0 or first.dtype.kind not in "biuf":
        return None
    return rows if all(row.shape == first.shape and row.dtype == first.dtype for row in rows) else None


@dataclass(frozen=True)
class Processed:
    """A task's results.

    Args:
        rows: its index rows.
        parts: the columns of each chunk.
        kept: the numbers of the rows of each chunk.
        skipped: the errors of skipped rows.
    """

    rows: pa.Table
    parts: list[Columns]
    kept: list[np.ndarray[Any, Any]]
    skipped: dict[int, str]


def assemble(processed: Processed, gather: Gather, words: Words, *, whole: bool, skip: bool) -> pa.Table:
    """Join all chunks in one block, of ``whole`` samples or of columns. With ``skip``, a column holds the errors of rows.

    Skipped rows stay, as copies of row 0 that carry their error: a task returns as many rows as it got, so no row is lost silently.

    Raises RunError for samples that cannot travel, or differ in shape.
    """
    if whole or any(whole_samples.is_nested(column) for part in processed.parts for column in part.values()):
        return _assemble_whole(processed, words, skip=skip)
    rows, parts, kept, skipped = processed.rows, processed.parts, processed.kept, processed.skipped
    order = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    columns: Columns = {}
    for name, values in wire.parts_of_columns(parts, list(map(len, kept))).items():
        if (gathered := gather.whole(name, len(order))) is not None:
            columns[name] = gathered
            continue
        columns[name] = _stacked(name, values, rows, order, words)
    if skipped:
        missing = np.array(sorted(skipped), dtype=np.int64)
        # The place of each row: good rows first, then the skipped ones, sorted back into the order of the task.
        back = np.argsort(np.concatenate((order, missing)), kind="stable")
        fill = np.where(back < len(order), back, 0)
        columns = take(columns, fill) if len(order) else {}
    if skip:
        columns[ERROR] = [skipped.get(i) for i in range(rows.num_rows)]
    columns[SAMPLE_ID] = rows.column(SAMPLE_ID).to_numpy()
    columns[POSITION] = rows.column(POSITION).to_numpy()
    # A chunk that a resume has cut is processed as a whole, and only its untrained rows travel.
    sent = untrained(rows) if TRAINED in rows.column_names else None
    try:
        return wire.encode(columns if sent is None else take(columns, sent))
    except UnsendableError as error:
        row = error.row if sent is None else int(sent[error.row])
        raise unsendable(error, words.sample(rows, row), words) from None


def _assemble_whole(processed: Processed, words: Words, *, skip: bool) -> pa.Table:
    """Join all chunks in one block of whole samples. Skipped rows hold no sample, and their error."""
    rows = processed.rows
    samples: list[list[Any]] = [[] for _ in range(rows.num_rows)]
    for part, numbers in zip(processed.parts, processed.kept, strict=True):
        for number, row in zip(numbers.tolist(), whole_samples.rows_of(part, len(numbers)), strict=True):
            samples[number] = row
    sent = untrained(rows)
    columns: Columns = {SAMPLE_ID: rows.column(SAMPLE_ID).to_numpy(), POSITION: rows.column(POSITION).to_numpy()}
    if skip:
        columns[ERROR] = [processed.skipped.get(i) for i in range(rows.num_rows)]
    block = wire.encode(take(columns, sent))
    try:
        for name, column in whole_samples.encode([samples[i] for i in sent.tolist()]).items():
            block = block.append_column(name, column)
    except UnsendableError as error:
        raise unsendable_sample(error, words.sample(rows, int(sent[error.row])), words) from None
    return block


def unsendable_sample(error: UnsendableError, sample: str, words: Words) -> RunError:
    return RunError(f"{sample}{words.made_by(', ')} is {error.what}: {error.instead}.")


def _stacked(name: str, parts: list[Column], rows: pa.Table, order: np.ndarray[Any, Any], words: Words) -> Column:
    try:
        parts = list(wire.typed([plain(name, part) for part in parts]))
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) < len(parts):
            return wire.stack(name, wire.listed(parts))
    except RaggedError as error:
        raise _ragged(name, error.shapes, [int(order[i]) for i in error.rows], rows, words) from None
    except UnsendableError as error:
        raise unsendable(error, words.sample(rows, int(order[error.row])), words) from None
    first = 0
    for array in arrays:
        if array.shape[1:] != arrays[0].shape[1:]:
            shapes = (arrays[0].shape[1:], array.shape[1:])
            raise _ragged(name, shapes, [int(order[0]), int(order[first])], rows, words)
        first += len(array)
    return wire.join(parts)


def plain(name: str, column: Any) -> Column:
    """The user's column as an array of numbers or a list of rows."""
    if not hasattr(column, "dtype"):
        return list(column)
    try:
        array = wire.as_array(column)
    except UnsendableError as error:
        raise UnsendableError(error.what, error.instead, name) from None
    return list(array) if array.dtype.hasobject else array


def unsendable(error: UnsendableError, sample: str, words: Words) -> RunError:
    return RunError(
        f"column {error.column!r} of {sample}{words.made_by(', ')} holds {error.what}, which cannot be sent to a worker: "
        f"{error.instead}."
    )


def _ragged(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], at: list[int], rows: pa.Table, words: Words
) -> RunError:
    who = [words.sample(rows, i) for i in at]
    return RunError(
        f"column {name!r} has rows of different shapes: {shapes[0]} for {who[0]}, {shapes[1]} for {who[1]}. "
        f"{wire.REMEDY_RAGGED}"
    )
