"""The wire format: how the columns of a block travel from a preprocessing task to a worker.

A block is an Arrow table of one chunk. Tensors are Arrow's own fixed-shape tensors, so that a worker on the task's host
sees them without a copy and on another host after one transfer. Beside the user's columns travel `sample_id`, the
position of the sample in its pass, and, where samples may be skipped, what was wrong with the skipped ones.

Where it stops: bytes in, bytes out; nothing here knows of ranks, devices or transforms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import RunError

SAMPLE_ID = "sample_id"
POSITION = "__position__"
ERROR = "__error__"
HIDDEN = (POSITION, ERROR)

Array = NDArray[Any]
Column = Array | list[Any]
Columns = dict[str, Column]


class RaggedError(ValueError):
    """Rows of one column differ in shape: ``shapes`` holds two that do, ``rows`` the first row of each."""

    def __init__(self, column: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], rows: tuple[int, int]) -> None:
        super().__init__(f"column {column!r} has rows of shapes {shapes[0]} and {shapes[1]}")
        self.column, self.shapes, self.rows = column, shapes, rows


def stack(name: str, rows: Sequence[Any]) -> Column:
    """One array of the rows' arrays or numbers; anything else (text, bytes, objects) stays a list.

    Raises RaggedError where arrays differ in shape.
    """
    if not len(rows) or isinstance(rows[0], str | bytes) or rows[0] is None:
        return list(rows)
    try:
        arrays = [as_array(row) for row in rows]
    except ValueError:  # nested lists without a shape, such as polygons
        return list(rows)
    if arrays[0].dtype == object:
        return list(rows)
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise RaggedError(name, (arrays[0].shape, array.shape), (0, i))
    return np.stack(arrays)


def stack_lists(name: str, rows: list[Any]) -> Column:
    """As :func:`stack` for rows that are lists of numbers; lists of different lengths become a list of arrays, which a
    transform may pad. Other rows stay as they are."""
    if not rows or not all(isinstance(row, list) for row in rows):
        return rows
    try:
        return stack(name, rows)
    except RaggedError:
        return [as_array(row) for row in rows]


def join(parts: Sequence[Column]) -> Column:
    """The parts of one column, one after another; arrays must agree in shape."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [row for part in parts for row in part]


def as_array(value: Any) -> Array:
    """A PIL image, tensor, array, number or nested list as an array, in its own layout."""
    if type(value).__module__.startswith("torch"):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)


def encode(columns: Mapping[str, Column]) -> pa.Table:
    """The block of these columns, zero-copy for contiguous arrays. Raises RunError for tensors without elements."""
    return pa.table({name: _encode(name, column) for name, column in columns.items()})


def _encode(name: str, column: Column) -> pa.Array:
    if not isinstance(column, np.ndarray):
        return pa.array(column)
    if column.ndim <= 1:
        return pa.array(column)
    width = int(np.prod(column.shape[1:]))
    if width == 0:
        raise RunError(
            f"column {name!r} has rows of shape {column.shape[1:]}, without an element: leave the column away, or correct "
            "what crops it to nothing."
        )
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(column.dtype), column.shape[1:])
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, width))


def decode(block: pa.Table) -> Columns:
    """The columns of a block: views of its memory, read-only, for numbers and tensors; lists for anything else."""
    return {name: _decode(block.column(name)) for name in block.column_names}


def _decode(column: pa.ChunkedArray) -> Column:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.FixedShapeTensorArray):
        if pa.types.is_boolean(array.type.value_type):  # Arrow packs them into bits and makes no tensor of them
            return np.reshape(array.storage.flatten().to_numpy(zero_copy_only=False), (-1, *array.type.shape))
        return np.asarray(array.to_numpy_ndarray())
    if pa.types.is_primitive(array.type) and array.null_count == 0:
        return np.asarray(array.to_numpy(zero_copy_only=False))
    return list(array.to_pylist())
