"""Gathering a block's rows in memory that is kept: the block is what stacking all rows would have made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.blocks.wire import Columns
from offload.pipeline.preprocessing.block import Gather, Scratch

chunks = st.lists(st.integers(1, 16), min_size=1, max_size=6)


def parts_of(counts: list[int], *, lists: bool, seed: int = 0) -> list[Columns]:
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 255, (count, 4, 3), dtype=np.uint8) for count in counts]
    return [{"image": list(array) if lists else array, "label": list(range(len(array)))} for array in arrays]


@given(counts=chunks, lists=st.booleans(), seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_the_gathered_column_is_all_rows_in_their_order(counts: list[int], lists: bool, seeds: list[int]) -> None:
    scratch = Scratch()
    for seed in seeds:  # one block after another, in the same memory
        parts = parts_of(counts, lists=lists, seed=seed)
        gather = Gather(sum(counts), scratch)
        placed = [gather.place(part) for part in parts]
        whole = gather.whole("image", sum(counts))
        assert whole is not None
        np.testing.assert_array_equal(whole, np.concatenate([np.stack(part["image"]) for part in parts]))
        assert [p["label"] for p in placed] == [p["label"] for p in parts]


def test_the_memory_is_kept_from_block_to_block() -> None:
    scratch = Scratch()
    addresses = set()
    for rows in (32, 16, 32):
        gather = Gather(rows, scratch)
        gather.place({"image": np.zeros((rows, 8, 8), np.uint8)})
        whole = gather.whole("image", rows)
        assert whole is not None
        addresses.add(whole.ctypes.data)
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(np.zeros((2, 5, 3), np.uint8), id="another-shape"),
        pytest.param(np.ones((2, 4, 3), np.float32), id="another-type"),
        pytest.param([None, None], id="missing"),
        pytest.param([np.zeros((4, 3), np.uint8), np.zeros((4, 2), np.uint8)], id="ragged"),
        pytest.param(["a", "b"], id="text"),
    ],
)
def test_what_does_not_fit_is_left_as_it_is(odd: object) -> None:
    gather = Gather(6, Scratch())
    first = gather.place({"image": np.full((2, 4, 3), 7, np.uint8)})["image"]
    assert gather.place({"image": odd})["image"] is odd  # type: ignore[dict-item]
    last = gather.place({"image": np.full((2, 4, 3), 9, np.uint8)})["image"]
    assert gather.whole("image", 6) is None
    assert np.all(np.asarray(first) == 7)  # what was placed before keeps its values
    assert np.all(np.asarray(last) == 9)


@given(counts=chunks, lists=st.booleans(), data=st.data())
def test_some_rows_are_placed_in_the_order_asked_for(counts: list[int], lists: bool, data: st.DataObject) -> None:
    gather, expected = Gather(2 * sum(counts), Scratch()), []
    for part in parts_of(counts, lists=lists):
        count = len(part["label"])
        rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2 * count))
        placed = gather.place(part, np.array(rows))
        assert list(placed["label"]) == rows
        expected += [part["image"][row] for row in rows]
    whole = gather.whole("image", len(expected))
    assert whole is not None
    np.testing.assert_array_equal(whole, np.stack(expected))


def test_more_rows_than_expected_stay_where_they_are() -> None:
    gather, late = Gather(3, Scratch()), np.full((2, 4), 5)
    assert np.all(gather.place({"x": np.zeros((2, 4), int)})["x"] == 0)
    assert gather.place({"x": late})["x"] is late
    assert gather.whole("x", 4) is None


def test_tensors_are_rows_too() -> None:
    gather = Gather(2, Scratch())
    gather.place({"image": [torch.full((3, 2), 1.5), torch.full((3, 2), 2.5)]})
    whole = gather.whole("image", 2)
    assert whole is not None
    assert whole.dtype == np.float32
    assert whole[:, 0, 0].tolist() == [1.5, 2.5]
