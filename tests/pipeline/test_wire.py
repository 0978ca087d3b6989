"""The wire format: what goes into a block comes out of it, tensors without a copy."""

from __future__ import annotations

import subprocess
import sys
from array import array as typed
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import Columns, RaggedError

DTYPES = [
    np.bool_,
    np.uint8,
    np.int8,
    np.uint16,
    np.int16,
    np.uint32,
    np.int32,
    np.uint64,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
]
shapes = st.tuples(st.integers(0, 5), hnp.array_shapes(min_dims=0, max_dims=3, max_side=5)).map(lambda s: (s[0], *s[1]))
arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes))


def through(columns: Columns) -> Columns:
    """Out of a task, through Arrow's own serialisation as the object store does it, and into a worker."""
    block = wire.encode(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema) as writer:
        writer.write_table(block)
    return wire.decode(pa.ipc.open_stream(sink.getvalue()).read_all())


def assert_same(got: Any, sent: np.ndarray[Any, Any]) -> None:
    assert isinstance(got, np.ndarray)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert np.array_equal(got, sent, equal_nan=sent.dtype.kind == "f")


@settings(deadline=None, max_examples=200)
@given(array=arrays)
def test_arrays_of_every_dtype_and_shape(array: np.ndarray[Any, Any]) -> None:
    assert_same(through({"x": array})["x"], array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (3,), (0, 4), (3, 1), (2, 4, 5, 3), (1, 2, 2, 2, 2)])
def test_each_dtype_in_each_rank(dtype: Any, shape: tuple[int, ...]) -> None:
    assert_same(through({"x": np.ones(shape, dtype)})["x"], np.ones(shape, dtype))


def test_images_that_are_not_contiguous() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 6), dtype=np.uint8)
    for view in (images.transpose(0, 2, 3, 1), images[::2], images[..., ::-1], images[:, :, 1:5]):
        assert_same(through({"image": view})["image"], view)


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8")),
            st.binary(),
            st.none() | st.integers(-(2**40), 2**40),
            st.lists(st.integers(0, 9)),
        )
    )
)
def test_text_bytes_missing_values_and_lists(rows: list[tuple[Any, ...]]) -> None:
    columns: Columns = {name: [row[i] for row in rows] for i, name in enumerate(("text", "bytes", "some", "list"))}
    got = through(columns)
    assert list(got) == list(columns)
    assert {name: list(column) for name, column in got.items()} == columns


def test_records_survive() -> None:
    boxes = [{"box": [1, 2], "name": "cat"}, {"box": [], "name": "dog"}]
    assert through({"target": boxes})["target"] == boxes


def test_text_in_numpy_arrays() -> None:
    assert through({"name": np.array(["a", "bcd"])})["name"] == ["a", "bcd"]
    assert through({"name": np.array(["a", None], dtype=object)})["name"] == ["a", None]


def test_masks_in_a_slice_of_a_block() -> None:
    masks = np.random.default_rng(0).random((5, 3, 7)) > 0.5
    assert_same(wire.decode(wire.encode({"mask": masks}).slice(1, 3))["mask"], masks[1:4])


def test_no_rows_and_no_columns() -> None:
    assert wire.decode(wire.encode({})) == {}
    assert_same(through({"x": np.zeros((0, 8, 8, 3), np.uint8)})["x"], np.zeros((0, 8, 8, 3), np.uint8))


def test_tensors_and_numbers_are_not_copied() -> None:
    images = np.zeros((8, 16, 16, 3), np.uint8)
    labels = np.arange(8)
    block = wire.encode({"image": images, "label": labels})
    got = wire.decode(block)
    assert np.shares_memory(got["image"], images)
    assert np.shares_memory(got["label"], labels)
    assert np.shares_memory(wire.decode(block.slice(2, 3))["image"], images)


def test_what_a_worker_sees_cannot_be_written_to() -> None:
    got = through({"x": np.zeros((2, 3), np.float32), "y": np.arange(2)})
    for column in got.values():
        assert isinstance(column, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_a_block_of_several_chunks() -> None:
    parts = [wire.encode({"x": np.full((n, 2), n), "y": np.arange(n), "z": ["t"] * n}) for n in (1, 3)]
    got = wire.decode(pa.concat_tables(parts))
    assert_same(got["x"], np.array([[1, 1], [3, 3], [3, 3], [3, 3]]))
    assert_same(got["y"], np.array([0, 0, 1, 2]))
    assert got["z"] == ["t"] * 4


# --- stacking rows ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(array=arrays)
def test_stack_undoes_the_split_into_rows(array: np.ndarray[Any, Any]) -> None:
    if len(array):
        assert_same(wire.stack("x", list(array)), array)


def test_stack_of_other_things() -> None:
    assert_same(wire.stack("x", [1, 2]), np.array([1, 2]))
    assert_same(wire.stack("x", [0.5, 2.0]), np.array([0.5, 2.0]))
    assert_same(wire.stack("x", [(1, 2), [3, 4]]), np.array([[1, 2], [3, 4]]))
    assert_same(wire.stack("x", [torch.ones(2), torch.zeros(2)]), np.array([[1, 1], [0, 0]], np.float32))
    for rows in ([], ["a", "b"], [b"a"], [None, "a"], [{"a": 1}], [None, np.zeros(2)]):
        assert wire.stack("x", rows) == list(rows) or rows[0] is None


class Graph:
    """As of networkx: its length and its items are those of its nodes."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, node: int) -> dict[int, Any]:
        return {node: {}}

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Instances(Graph):
    """As of detectron2: it has a length and items, and forbids the loop over them."""

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError("`Instances` object is not iterable!")


@pytest.mark.parametrize("kind", [Graph, Instances])
def test_objects_that_have_items_stay_what_they_are(kind: type[Graph]) -> None:
    for rows in ([kind(), kind()], [[kind()], [kind()]], [[], [kind(), kind()]], [[kind()], []]):
        assert wire.stack("graph", rows) == rows
    assert [type(row) for row in through({"graph": [kind(), kind()]})["graph"]] == [kind, kind]


@pytest.mark.parametrize("make", [lambda n: typed("q", range(n)), lambda n: deque(range(n)), range])
def test_sequences_of_numbers_are_arrays(make: Any) -> None:
    assert np.array_equal(wire.stack("x", [make(2), make(2)]), [[0, 1], [0, 1]])


def test_stack_of_tensors_with_a_gradient() -> None:
    assert_same(wire.stack("x", [torch.ones(2, requires_grad=True)]), np.ones((1, 2), np.float32))


@pytest.mark.parametrize("nothing", [[], ()])
def test_rows_of_nothing_stay_what_they_are(nothing: Any) -> None:
    assert through({"x": wire.stack("x", [nothing, nothing])})["x"] == [nothing, nothing]


def test_polygons_stay_lists() -> None:
    # One row that has no rectangular shape of its own cannot be an array.
    rows = [[[1, 2], [3]], [[4]]]
    assert wire.stack("polygon", rows) == rows
    assert through({"polygon": wire.stack("polygon", rows)})["polygon"] == rows


def test_ragged_rows_name_both_shapes_and_rows() -> None:
    rows = [np.zeros((4, 5, 3)), np.zeros((4, 5, 3)), np.zeros((4, 6, 3))]
    with pytest.raises(RaggedError, match=r"column 'image' has rows of shapes \(4, 5, 3\) and \(4, 6, 3\)") as caught:
        wire.stack("image", rows)
    assert (caught.value.column, caught.value.rows) == ("image", (0, 2))
    assert caught.value.shapes == ((4, 5, 3), (4, 6, 3))


def test_join() -> None:
    whole = np.arange(6).reshape(3, 2)
    assert wire.join([whole]) is whole
    assert_same(wire.join([whole[:1], whole[1:]]), whole)
    assert wire.join([["a"], ["b", "c"]]) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.complex64])
def test_arrays_without_elements_keep_their_shape(kind: type) -> None:
    (found,) = wire.decode(wire.encode({"x": np.zeros((2, 0, 3), kind)})).values()
    assert_same(found, np.zeros((2, 0, 3), kind))


def test_numbers_are_decoded_without_pandas(tmp_path: Path) -> None:
    """Importing it takes half a second, for which the first batch of every new worker would wait."""
    stored = tmp_path / "block.arrow"
    columns = {"label": np.arange(6), "weight": np.ones(6, np.float16), "image": np.zeros((6, 3, 4), np.uint8)}
    block = wire.encode(columns)
    with pa.ipc.new_file(stored, block.schema) as file:
        file.write(block)
    script = f"""
import sys, pyarrow
from offload.pipeline.blocks import wire
columns = wire.decode(pyarrow.ipc.open_file({str(stored)!r}).read_all().slice(2))
assert columns["label"].tolist() == [2, 3, 4, 5], columns
assert columns["weight"].dtype == "float16" and len(columns["weight"]) == 4, columns
assert columns["image"].shape == (4, 3, 4), columns
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
