"""The columns of a block hold the values that Ray's own iteration gives, with one mark for what is missing, wherever blocks are cut."""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.data.block import BlockAccessor
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray

from offload.pipeline.raydata.columns import columns_of_block
from offload.pipeline.raydata.unit_maker import joined
from tests.pipeline.arrow_tables import arrow_columns, is_missing, plain

NUMBERS, TIMES = "iuf", "mM"


def mark_of(kind: pa.DataType, value: Any) -> bool:
    """Whether a missing value of this type has the mark that the documentation promises."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind):
        return isinstance(value, float | np.floating) and math.isnan(value)
    if pa.types.is_temporal(kind) and not pa.types.is_time(kind):
        return isinstance(value, np.datetime64 | np.timedelta64) and bool(np.isnat(value))
    return value is None


def rows_of_ray(block: Any) -> list[Any]:
    return [plain(dict(row)) for row in BlockAccessor.for_block(block).iter_rows(public_row_format=True)]


def rows_of(columns: dict[str, Any]) -> list[Any]:
    return [plain(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


@given(table=arrow_columns(), cuts=st.lists(st.integers(0, 8), max_size=3))
@settings(max_examples=150, deadline=None)
def test_every_type_has_the_values_and_the_marks_that_are_promised(table: pa.Table, cuts: list[int]) -> None:
    columns: Any = columns_of_block(table)
    expected = rows_of_ray(table)
    assert rows_of(columns) == expected
    for field in table.schema:
        assert all(mark_of(field.type, value) for value in columns[field.name] if is_missing(value)), field
    edges = sorted({0, *cuts, len(table)} & set(range(len(table) + 1)))
    parts = [table.slice(start, stop - start) for start, stop in itertools.pairwise(edges)]
    again: Any = joined([columns_of_block(part) for part in parts])
    assert rows_of(again) == expected
    for name, column in again.items():
        if isinstance(columns[name], np.ndarray):
            assert column.dtype.kind in (NUMBERS if columns[name].dtype.kind in NUMBERS else columns[name].dtype.kind)


@given(table=arrow_columns(of_pandas=True))
@settings(max_examples=60, deadline=None)
def test_pandas_marks_of_what_is_missing_mean_the_same(table: pa.Table) -> None:
    for types in (
        None,
        {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.string(): pd.StringDtype()}.get,
    ):
        columns: Any = columns_of_block(table.to_pandas(types_mapper=types))
        assert rows_of(columns) == rows_of_ray(table)
        for field in table.schema:
            assert all(mark_of(field.type, value) for value in columns[field.name] if is_missing(value)), field


UNTYPED = pa.table({"x": pa.nulls(2)})


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        (["a", "b"], None),
        ([b"a", b"b"], None),
        ([True, False], None),
        ([1, 2], math.nan),
        ([0.5, None], math.nan),
        ([[1], [1, 2]], None),
        ([{"a": 1}, None], None),
    ],
)
def test_a_column_that_a_block_lacks_values_for_has_the_type_of_its_neighbours(values: list[Any], missing: Any) -> None:
    """As of a CSV file in which all cells of a column are empty: nothing tells there whether they are numbers or text."""
    blocks = [columns_of_block(UNTYPED), columns_of_block(pa.table({"x": values}))]
    for order in ([0, 1], [1, 0]):
        column: Sequence[Any] = joined([blocks[number] for number in order])["x"]
        found = [column[i] for i in ((0, 1) if order[0] == 0 else (2, 3))]
        assert all(value is None if missing is None else math.isnan(value) for value in found)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_tensors_of_one_shape_and_of_many(dtype: Any) -> None:
    whole = np.arange(12).reshape(3, 2, 2).astype(dtype)
    ragged = np.empty(3, dtype=object)
    ragged[:] = [whole[0], whole[0, :1], np.zeros((0, 2), dtype)]
    found: Any = columns_of_block(
        pa.table({"one": ArrowTensorArray.from_numpy(whole), "many": ArrowVariableShapedTensorArray.from_numpy(ragged)})
    )
    np.testing.assert_array_equal(found["one"], whole)
    assert found["one"].dtype == dtype
    for mine, theirs in zip(found["many"], ragged, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == dtype


def test_decimals_stay_exact() -> None:
    values = [decimal.Decimal("0.10"), None, decimal.Decimal("123456789012345678.99")]
    assert list(columns_of_block(pa.table({"x": values}))["x"]) == values
