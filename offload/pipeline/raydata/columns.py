"""The columns of a block of Ray Data: those of Ray's own batches, with one mark for missing values.

Arrow, pandas and NumPy mark a missing value as null, None, NaN, NaT or NA, and which one a batch of Ray holds depends on the kind of block.
Here, a missing number is NaN, a missing time NaT, and any other missing value None. Where it stops: a column without any value in a
block has no type there. Ray gives it NaN, and :func:`offload.pipeline.blocks.wire.typed` makes it None beside text or objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data.block import BlockAccessor

from offload.pipeline.blocks.wire import Column, Columns

_OF_PANDAS = ("NAType", "NaTType")  # the classes of pandas.NA and pandas.NaT


def columns_of_block(block: Any) -> Columns:
    """The columns of a block of Arrow or pandas. Empty if it has no rows."""
    if isinstance(block, pa.Table):
        block = _with_values(block)
    accessor: Any = BlockAccessor.for_block(block)
    return (
        marked_objects({name: _values(accessor, name) for name in accessor.column_names()})
        if accessor.num_rows()
        else {}
    )


def _values(accessor: Any, name: str) -> Any:
    try:
        return accessor.to_numpy(name)
    except pa.ArrowNotImplementedError:  # such as lists of times of day, which Ray's batches refuse, and its rows hold
        return accessor.to_arrow().column(name).to_pylist()


def marked_objects(columns: Mapping[str, Any]) -> Columns:
    """The columns, with one mark for missing values in those of Python objects."""
    return {name: marked(column) if _is_of_objects(column) else column for name, column in columns.items()}


def _is_of_objects(column: Any) -> bool:
    return isinstance(column, list) or (isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1)


def _with_values(table: pa.Table) -> pa.Table:
    """The table with values in place of categories: for a missing one, Arrow's array would hold another category."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(field.type.value_type))
    return table


def marked(values: Column, *, of_numbers: bool = False) -> Column:
    """The Python objects of a column, with one mark for missing values: NaN among numbers, and None among others.

    ``of_numbers``: whether the column's type is numeric, which nothing else tells if all values are missing.
    """
    lacking = [_is_missing(value) for value in values]
    if not any(lacking):
        return values
    marks = list(zip(values, lacking, strict=True))
    known = [value for value, lacks in marks if not lacks]
    if all(map(_is_number, known)) and (known or of_numbers):
        if all(isinstance(value, float | np.floating) for value, lacks in marks if lacks):
            return values  # they are NaN, perhaps in half precision
        return np.array([math.nan if lacks else value for value, lacks in marks], dtype=np.float64)
    return [None if lacks else value for value, lacks in marks]


def _is_missing(value: Any) -> bool:
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return value is None or type(value).__name__ in _OF_PANDAS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
