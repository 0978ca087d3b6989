"""The columns of results: what counts as one row for each sample, and their types in Arrow.

Where it stops: :mod:`offload.inference.model_worker` makes the results, and :mod:`offload.inference.parts` stores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from offload.errors import RunError


def without_rows(column: Any, rows: int) -> str | None:
    """Why a column does not hold one row for each of so many samples, such as ``has 3 rows``. None if it does.

    A list may have an entry of any length for each sample. A dict, or a tuple of tensors, holds several columns instead.
    """
    if isinstance(column, Mapping):
        return "is a dict"
    if isinstance(column, tuple) and any(map(_holds_many, column)):
        return "is a tuple of several values"
    if isinstance(column, str | bytes | Set) or not hasattr(column, "__len__") or getattr(column, "ndim", 1) == 0:
        return f"is a {type(column).__name__} without rows"
    return f"has {len(column)} rows" if len(column) != rows else None


def _holds_many(value: Any) -> bool:
    """Return whether an item of a tuple is more than the value of a sample."""
    if isinstance(value, list | tuple):
        return any(map(_holds_many, value))
    return isinstance(value, Mapping) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0)


def as_array(name: str, column: Any) -> pa.Array:
    """The rows of an output as Arrow has them: numbers, or lists of fixed length. Raises RunError for what Arrow has no type for."""
    try:
        if isinstance(column, torch.Tensor):
            column = column.detach()
            if column.dtype in (torch.bfloat16, torch.float16):  # few readers of Parquet know them
                column = column.float()
            column = column.cpu().resolve_conj().resolve_neg().numpy()
        if isinstance(column, np.ndarray):
            return _of_numpy(np.ascontiguousarray(column))
        return pa.array(column)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise RunError(
            f"the column {name!r} cannot be stored: {str(error).splitlines()[0]}. Return tensors of numbers, or lists of numbers and text."
        ) from None


def _of_numpy(column: np.ndarray[Any, Any]) -> pa.Array:
    values = pa.array(column.reshape(-1))
    for length in reversed(column.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values


def unified(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """The schema that holds the results of both. They may differ where values are missing: a batch without any value of a column does not
    know its type. Raises RunError for other differences."""
    if schema == other:
        return schema
    if len(schema) != len(other):
        raise _unlike(f"{len(schema)} and {len(other)} columns")
    fields = []
    for a, b in zip(schema, other, strict=True):
        kind = _common(a.type, b.type) if a.name == b.name else None
        if kind is None:
            raise _unlike(f"{a.name}: {a.type} and {b.name}: {b.type}")
        fields.append(pa.field(a.name, kind))
    return pa.schema(fields)


def _unlike(how: str) -> RunError:
    return RunError(
        f"the outputs of two batches differ in kind ({how}). Return the same columns for every batch, with rows of one length."
    )


def _common(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if there is none."""
    types = pa.types
    if a == b or types.is_null(b):
        return a
    if types.is_null(a):
        return b
    # A column with a missing number is a list, whose numbers have Python's size.
    if (types.is_integer(a) and types.is_integer(b)) or (types.is_floating(a) and types.is_floating(b)):
        return pa.unify_schemas([pa.schema({"": a}), pa.schema({"": b})], promote_options="permissive").field(0).type
    if types.is_struct(a) and types.is_struct(b) and [field.name for field in a] == [field.name for field in b]:
        inner = [_common(x.type, y.type) for x, y in zip(a, b, strict=True)]
        return None if None in inner else pa.struct([(x.name, kind) for x, kind in zip(a, inner, strict=True)])
    if not (_is_list(a) and _is_list(b)) or (inner_type := _common(a.value_type, b.value_type)) is None:
        return None
    fixed = types.is_fixed_size_list(a), types.is_fixed_size_list(b)
    if all(fixed):
        return pa.list_(inner_type, a.list_size) if a.list_size == b.list_size else None
    return pa.list_(inner_type)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Results as rows of a schema of :func:`unified`. Raises RunError for a value that its type does not hold."""
    if batch.schema == schema:
        return batch
    arrays = []
    for field, array in zip(schema, batch.columns, strict=True):
        try:
            arrays.append(array.cast(field.type))
        except pa.ArrowException as error:
            raise RunError(f"the column {field.name!r} cannot be stored: {str(error).splitlines()[0]}.") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
