"""Batches of tables are those that Ray Data makes: the same rows, types and values, of the size that was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.data._internal.execution.operators.map_transformer import BatchMapTransformFn
from ray.data.extensions import ArrowTensorArray

from offload.pipeline.raydata.table_batches import numpy_batches

KINDS: dict[str, Callable[[int, int], pa.Array]] = {
    "ints": lambda start, rows: pa.array(range(start, start + rows), pa.int64()),
    "floats": lambda start, rows: pa.array([i / 7 for i in range(start, start + rows)], pa.float32()),
    "missing": lambda start, rows: pa.array(
        [None if i % 5 == 3 else i for i in range(start, start + rows)], pa.int32()
    ),
    "text": lambda start, rows: pa.array(
        [None if i % 9 == 1 else f"t{i}" for i in range(start, start + rows)], pa.string()
    ),
    "flags": lambda start, rows: pa.array([i % 3 == 0 for i in range(start, start + rows)], pa.bool_()),
    "lists": lambda start, rows: pa.array([[i, i] for i in range(start, start + rows)], pa.list_(pa.int64())),
    "times": lambda start, rows: pa.array(range(start, start + rows), pa.timestamp("ms")),
}


def tables_of(chunks: list[list[int]], kinds: Iterable[str]) -> list[pa.Table]:
    """A table for each list, with chunks of so many rows."""
    tables, start = [], 0
    for counts in chunks:
        columns: dict[str, list[pa.Array]] = {kind: [] for kind in kinds}
        for rows in counts:
            for kind, arrays in columns.items():
                arrays.append(KINDS[kind](start, rows))
            start += rows
        tables.append(pa.table({kind: pa.chunked_array(arrays) for kind, arrays in columns.items()}))
    return tables


def of_ray(tables: Iterable[Any], size: int) -> list[Any]:
    return list(
        BatchMapTransformFn(lambda batches, _: batches, batch_size=size, batch_format="numpy")._pre_process(tables)
    )


def refused(tables: Iterable[Any]) -> Iterable[Any]:
    raise AssertionError(f"left to Ray: {next(iter(tables))}")


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert [list(batch) for batch in found] == [list(batch) for batch in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name, column in theirs.items():
            assert mine[name].dtype == column.dtype
            if column.dtype == object:
                assert list(map(str, mine[name])) == list(map(str, column))
            else:
                np.testing.assert_array_equal(mine[name], column)
            assert mine[name].flags.writeable == column.flags.writeable


some_chunks = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4)


@given(chunks=some_chunks, kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1), size=st.integers(1, 12))
def test_batches_are_those_of_ray(chunks: list[list[int]], kinds: set[str], size: int) -> None:
    tables = tables_of(chunks, sorted(kinds))
    assert_equal(list(numpy_batches(tables, size, refused)), of_ray(tables, size))


UNUSUAL: dict[str, Callable[[], Any]] = {
    "tensors": lambda: pa.table({"ints": ArrowTensorArray.from_numpy(np.zeros((5, 2, 2)))}),
    "pandas": lambda: pd.DataFrame({"ints": np.arange(5)}),
    "nothing": lambda: pa.table({"ints": pa.nulls(5)}),
    "other types": lambda: pa.table({"ints": pa.array([1, 2, 3], pa.int16())}),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_from_an_unusual_block_on_ray_makes_the_batches(kind: str) -> None:
    blocks = [*tables_of([[5, 4]], ["ints"]), UNUSUAL[kind]()]
    left: list[Any] = []

    def otherwise(rest: Iterable[Any]) -> Iterable[Any]:
        left.extend(rest)
        return []

    found = list(numpy_batches(blocks, 4, otherwise))
    assert [batch["ints"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(block) for block in left] == [1, len(blocks[1])]


def test_numbers_are_views_that_cannot_be_written_to() -> None:
    (table,) = tables_of([[8]], ["ints"])
    address = table.column("ints").chunk(0).buffers()[1].address
    for number, batch in enumerate(numpy_batches([table], 4, refused)):
        assert batch["ints"].ctypes.data == address + 32 * number
        with contextlib.suppress(ValueError):
            batch["ints"][0] = 99
    assert table.column("ints").to_pylist() == list(range(8))
