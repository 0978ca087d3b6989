"""Gather the rows of a block in reused memory, while the rows are still in the core's cache.

Blocks are tens of MB. Stacking all rows at the end would read each row from memory again, and write each block to pages that the
kernel has to clear first. That would cost 5 % of decoding and cropping a JPEG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.pipeline.wire import Array, Column, Columns, as_array, take

Rows: TypeAlias = NDArray[np.integer[Any]]
"""Numbers of rows."""


class Scratch:
    """Memory for one block at a time, reused from block to block. Finish with one block before you fill the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def rows(self, name: str, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Uninitialised ``(rows, *shape)`` of a dtype."""
        kept = self._kept.get(name)
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
