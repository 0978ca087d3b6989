"""Rows that are taken a stretch at once are those that a call for itself would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.sources import parquet_rows
from offload.pipeline.sources.parquet_rows import Stretches, columns_of

ROWS = 8

Stretch = tuple[int, list[int]]
some_rows = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12)
some_stretches = st.lists(st.tuples(st.integers(0, 2), some_rows), max_size=4)


def group(number: int) -> pa.Table:
    """A group whose values tell their place. The first group lacks a number, and the last one has its columns in another order."""
    rows = np.arange(ROWS) + 100 * number
    counts = [None if number == 0 and row == 3 else row for row in rows.tolist()]
    columns = {"number": rows * 0.5, "count": pa.array(counts, pa.int64()), "text": [f"{row}" for row in rows]}
    return pa.table(dict(reversed(columns.items())) if number == 2 else columns)


def plain(pieces: Sequence[Stretch]) -> dict[str, list[Any]]:
    """The columns of the pieces, row by row."""
    rows = [row for number, places in pieces for row in group(number).take(pa.array(places)).to_pylist()]
    return {name: [row[name] for row in rows] for name in ("number", "count", "text")}


def read(held: Stretches, pieces: Sequence[Stretch]) -> dict[str, list[Any]]:
    found = [held.rows(number, np.array(places), lambda n=number: group(n)) for number, places in pieces]
    return {name: list(column) for name, column in columns_of(found).items()}


@settings(deadline=None)
@given(task=some_stretches, data=st.data())
def test_every_row_is_that_of_its_group(task: list[Stretch], data: st.DataObject) -> None:
    held = Stretches((number, np.array(places)) for number, places in task)
    calls: list[list[Stretch]] = []
    for number, places in task:  # calls of a part of a stretch, of all of it, or of it and the next one
        cut = data.draw(st.integers(0, len(places)))
        calls += [[(number, part)] for part in (places[:cut], places[cut:]) if part]
        if data.draw(st.booleans()):
            calls.append(data.draw(st.lists(st.tuples(st.integers(0, 2), some_rows), min_size=1, max_size=3)))
    if len(task) > 1:
        calls.append(task[:2])
    for call in calls:
        assert read(held, call) == plain(call)


def test_a_row_group_is_read_once_for_all_calls_of_its_stretch() -> None:
    places = np.random.default_rng(0).permutation(ROWS)
    held, reads = Stretches([(1, places)]), list[int]()

    def table() -> pa.Table:
        reads.append(1)
        return group(1)

    for start in range(0, ROWS, 2):
        held.rows(1, places[start : start + 2], table)
    assert len(reads) == 1


def test_what_a_transform_writes_is_not_in_later_calls() -> None:
    """Arrow makes arrays that can be written to of booleans, of dates, and of floats some of which are missing."""
    flags, days, ages = [True] * ROWS, pa.array([3] * ROWS, pa.date32()), [1.0] * (ROWS - 1) + [None]
    table = pa.table({"flag": flags, "day": days, "age": ages, "list": pa.array([[1.0]] * ROWS)})
    held = Stretches([(1, np.arange(ROWS))])
    for _ in range(2):
        found: dict[str, Any] = columns_of([held.rows(1, np.arange(2, 6), lambda: table)])
        assert found["flag"].all()
        assert found["day"][0] == np.datetime64("1970-01-04")
        assert found["age"].tolist() == [1.0] * 4
        assert found["list"].tolist() == [[1.0]] * 4
        found["flag"][:] = False
        found["day"][:] = np.datetime64("2026-01-01")
        found["age"][:] = 0
        found["list"][:] = 0


def test_the_rows_of_a_large_row_group_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "MOST_BYTES", 10)
    held = Stretches([(1, np.arange(ROWS))])
    found = held.rows(1, np.arange(2), lambda: group(1))
    assert found.table().num_rows == found.table().to_batches()[0].num_rows == 2
    assert found.table().column("number").chunk(0).buffers()[1].size <= 64  # two numbers, padded
