"""Every kind of value that a data set or a transform may return: it arrives as it was, or the error says what to write."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import offload
from offload.errors import RunError
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.raydata.execution import encode_foreign
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.pipeline.sources.parquet import list_parquet
from offload.train.worker.data.delivery import as_tensor
from tests.helpers import case

ROWS = 20  # of more than one chunk
BOXES = np.dtype([("x", "f4"), ("name", "U3")])
BF16 = torch.arange(4, dtype=torch.bfloat16) / 3


class Point:
    """What a user's own class looks like: it compares by value."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


class Items:
    """A map-style data set of one column, ``x``."""

    def __init__(self, value: Callable[[int], Any]) -> None:
        self.value = value

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.value(i)}


def image(i: int) -> Any:
    return Image.fromarray(np.full((4, 5, 3), i, np.uint8))


def mixed_image(i: int) -> Any:
    return image(i) if i % 2 else np.asarray(image(i))


# Each row gives a sample's value, and what a batch of samples is to be when it differs from the list of the values.
ARRIVE: dict[str, tuple[Callable[[int], Any], Callable[[list[Any]], Any] | None]] = {
    "int": (lambda i: i, np.array),
    "float": (lambda i: i / 3, np.array),
    "int and float": (lambda i: i if i % 2 else i / 3, np.array),
    "bool": (lambda i: i % 2 == 0, np.array),
    "uint64": (lambda i: np.uint64(2**63 + i), np.array),
    "int64 beside uint64": (lambda i: 2**63 + i if i % 2 else -i, None),
    "float16": (lambda i: np.full((2, 2), i / 3, np.float16), np.stack),
    "longdouble": (lambda i: np.longdouble(1) / (i + 1), np.stack),
    "another byte order": (lambda i: np.arange(3, dtype=">f4") + i, lambda v: np.stack(v).astype("<f4")),
    "complex64": (lambda i: np.full(3, i + 2j, np.complex64), np.stack),
    "complex": (lambda i: complex(i, 1), np.array),
    "datetime64[D]": (lambda i: np.datetime64("2024-02-28") + i, np.array),
    "datetime64[h] rows": (lambda i: np.arange(3).astype("datetime64[h]") + i, np.stack),
    "timedelta64[ms]": (lambda i: np.timedelta64(i, "ms"), np.array),
    "datetime": (lambda i: datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(i), None),
    "time": (lambda i: datetime.time(i), None),
    "Decimal": (lambda i: decimal.Decimal(i) / 3, None),
    "records": (lambda i: np.array([(i, "ab")] * 2, BOXES), np.stack),
    "void": (lambda i: np.void(bytes([i, 0])), np.stack),
    "not contiguous": (lambda i: np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::-1] + i, np.stack),
    "no dimension": (lambda i: np.array(i, np.int16), np.stack),
    "text": (lambda i: "ä" * i, None),
    "np.str_": (lambda i: np.str_(i), None),
    "half of a surrogate pair": (lambda i: "\ud800" * i, None),
    "bytes": (lambda i: b"\0" * i, None),
    "text and bytes": (lambda i: "a" if i % 2 else b"a", None),
    "text and numbers": (lambda i: i if i % 2 else str(i), None),
    "None and numbers": (lambda i: i if i % 3 else None, None),
    "numbers and None": (lambda i: None if i % 3 else i, None),
    "None": (lambda i: None, None),
    "large ints": (lambda i: 10**30 + i, None),
    "dicts of other keys": (lambda i: {"a": i} if i % 2 else {"b": (i, None)}, None),
    "dict of int keys": (lambda i: {i: i}, None),
    "set": (lambda i: {i, "a"}, None),
    "nested lists": (lambda i: [[1] * (i % 3), [2]], None),
    "tuples of text": (lambda i: ("a", str(i)), None),
    "an object of the user's": (lambda i: Point(i), None),
    "PIL images": (image, lambda v: np.stack([np.asarray(each) for each in v])),
    "PIL images and arrays": (mixed_image, lambda v: np.stack([np.asarray(each) for each in v])),
    "tensors": (lambda i: torch.full((2,), i, requires_grad=True, dtype=torch.float32),
                lambda v: torch.stack(v).detach().numpy()),
    "conjugate": (lambda i: torch.full((2,), i + 1j).conj(), lambda v: torch.stack(v).resolve_conj().numpy()),
    "torch.Size": (lambda i: torch.Size((i, 2)), np.array),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "generator": (lambda i: (x for x in "ab"), r"an object of type generator \(TypeError: cannot pickle"),
    "lock": (lambda i: {"lock": threading.Lock()}, r"an object of type dict \(TypeError: cannot pickle '_thread.lock'"),
    "sparse": (lambda i: torch.eye(3).to_sparse(), r"a sparse tensor \(sparse_coo\).*return \.to_dense\(\)"),
    "meta": (lambda i: torch.empty(3, device="meta"), r"a float32 tensor on meta.*on the CPU"),
    "masked": (lambda i: np.ma.masked_array([1, 2], [True, False]), r"a masked array.*\.filled\(0\)"),
    "array of locks": (lambda i: np.array([threading.Lock()]), "an object of type ndarray"),
}


def rows_of(count: int = ROWS) -> pa.Table:
    numbers = np.arange(count)
    return pa.table({"item": numbers, SAMPLE_ID: numbers, POSITION: numbers})


def by_data_set(value: Callable[[int], Any]) -> pa.Table:
    index = list_torch_dataset(Items(value))
    return process(Recipe(transform=None, kind="none", seed=0, reader=index.reader), rows_of(), epoch=0)


def by_transform(value: Callable[[int], Any], kind: Any) -> pa.Table:
    index = list_torch_dataset(Items(lambda i: i))

    def of_batch(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [value(i) for i in batch["x"]]}

    def of_sample(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": value(sample["x"])}

    made = Recipe(transform=of_batch if kind == "batch" else of_sample, kind=kind, seed=0, reader=index.reader)
    return process(made, rows_of(), epoch=0)


def by_ray_data(value: Callable[[int], Any]) -> pa.Table:
    def of_batch(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [value(i) for i in batch["id"].tolist()]}

    made = Recipe(transform=of_batch, kind="batch", seed=0)
    return encode_foreign(made, {"id": np.arange(ROWS)}, id_column="id", done=Ranges())


WAYS: dict[str, Callable[[Callable[[int], Any]], pa.Table]] = {
    "data set": by_data_set,
    "transform": lambda value: by_transform(value, "batch"),
    "sample transform": lambda value: by_transform(value, "sample"),
    "ray.data": by_ray_data,
}


def arrived(block: pa.Table) -> Any:
    """Column ``x`` after Arrow's serialisation, as the object store does it, and in two slices as workers take it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema) as writer:
        writer.write_table(block)
    whole = pa.ipc.open_stream(sink.getvalue()).read_all()
    return wire.join([wire.decode(whole.slice(0, 7))["x"], wire.decode(whole.slice(7))["x"]])


@pytest.mark.parametrize("way", WAYS)
def test_it_arrives_as_it_was(way: str) -> None:
    for kind, (value, stacked) in ARRIVE.items():
        with case(kind):
            check_arrival(way, value, stacked)


def check_arrival(way: str, value: Callable[[int], Any], stacked: Any) -> None:
    got, sent = arrived(WAYS[way](value)), [value(i) for i in range(ROWS)]
    if stacked is None:
        assert isinstance(got, list)
        assert got == sent
        assert [type(each) for each in got] == [str if isinstance(s, np.str_) else type(s) for s in sent]
    else:
        want = stacked(sent)
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_travel_is_named(way: str) -> None:
    for kind, (value, says) in REFUSED.items():
        with case(kind):
            with pytest.raises(RunError, match=rf"column 'x' of sample 5\b.* holds {says}") as caught:
                WAYS[way](lambda i, value=value: value(i) if i == 5 else np.zeros(2))
            text = str(caught.value)
            assert ("item 5 of Items" in text) == (way != "ray.data")
            assert ("returned by the transform" in text) == (way != "data set")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_types_of_torch_alone(way: str, dtype: torch.dtype) -> None:
    got = as_tensor(arrived(WAYS[way](lambda i: (torch.arange(6).reshape(2, 3) / 7 + i).to(dtype))))
    want = torch.stack([(torch.arange(6).reshape(2, 3) / 7 + i).to(dtype) for i in range(ROWS)])
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.int8), want.view(torch.int8))


def test_a_transform_may_return_one_tensor_for_all_rows() -> None:
    index = list_torch_dataset(Items(lambda i: i))
    made = Recipe(transform=lambda b: {"x": torch.tensor(b["x"]).bfloat16()}, kind="batch", seed=0, reader=index.reader)
    assert as_tensor(arrived(process(made, rows_of(), epoch=0))).tolist() == list(range(ROWS))


@pytest.mark.parametrize("column", [np.ma.masked_array(np.zeros((16, 2)), True), torch.eye(16).to_sparse()])
def test_a_whole_column_that_cannot_travel(column: Any) -> None:
    index = list_torch_dataset(Items(lambda i: i))
    made = Recipe(transform=lambda batch: {"x": column}, kind="batch", seed=0, reader=index.reader)
    with pytest.raises(RunError, match=r"column 'x' of sample 0 .* holds a (masked array|sparse tensor)"):
        process(made, rows_of(16), epoch=0)


@pytest.mark.parametrize("name", [1, None, SAMPLE_ID, POSITION])
def test_names_that_columns_cannot_have(name: Any) -> None:
    index = list_torch_dataset(Items(lambda i: i))
    made = Recipe(transform=lambda batch: {name: batch["x"]}, kind="batch", seed=0, reader=index.reader)
    with pytest.raises(
        RunError, match=rf"the name of a column returned by the transform .* is {name!r}, .*another name"
    ):
        process(made, rows_of(), epoch=0)


# --- data sets that return junk ---------------------------------------------------------------------------------------


def failure(dataset: Any) -> str:
    index = list_torch_dataset(dataset)
    with pytest.raises(RunError) as caught:
        process(Recipe(transform=None, kind="none", seed=0, reader=index.reader), rows_of(), epoch=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("getitem", "says"),
    [
        (lambda self, i: None, "sample 0 .*__getitem__ returned None: return a dict"),
        (lambda self, i: (x for x in [i]), "__getitem__ returned a generator"),
        (lambda self, i: {"x": 0, **({"y": 1} if i == 3 else {})},
         "item 0 of Junk has the columns x, and item 3 has x, y.*a value may be None"),
        (lambda self, i: {0: i}, "the name of a column of the data set is 0, which is not text"),
        (lambda self, i: exit(3), r"reading sample 0 \(item 0 of Junk\) raised SystemExit: 3"),
    ],
)  # fmt: skip
def test_a_getitem_that_returns_junk(getitem: Any, says: str) -> None:
    junk = type("Junk", (Items,), {"__getitem__": getitem})
    assert re.search(says, failure(junk(int)))


@pytest.mark.parametrize("returned", [None, [], 5, (x for x in "ab")])
def test_getitems_that_return_junk(returned: Any) -> None:
    junk = type("Junk", (Items,), {"__getitems__": lambda self, items: returned})
    assert "__getitems__ was asked for" in failure(junk(int))


@pytest.mark.parametrize("length", [-1, 2.5, None, "5", 10**30, 2**40])
def test_a_len_that_is_none(length: Any) -> None:
    junk = type("Junk", (Items,), {"__len__": lambda self: length})
    with pytest.raises(
        offload.ConfigError, match=r"from_torch\(Junk\) (cannot be determined|says).*Correct its __len__"
    ):
        list_torch_dataset(junk(int))


def test_a_len_that_raises_and_a_class_in_place_of_a_data_set() -> None:
    def broken(self: Any) -> int:
        raise FileNotFoundError("no index here")

    with pytest.raises(offload.ConfigError, match="FileNotFoundError: no index here"):
        list_torch_dataset(type("Junk", (Items,), {"__len__": broken})(int))
    with pytest.raises(offload.ConfigError, match="found the class Items: construct one"):
        list_torch_dataset(Items)


def test_a_len_that_is_too_long_names_the_sample() -> None:
    assert "reading sample 3 (item 3 of list) raised IndexError" in failure([{"x": i} for i in range(3)])


class RunsCode:
    """Unpickled, it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_parquet_file_of_somebody_elses_runs_no_code(tmp_path: Path) -> None:
    made = tmp_path / "made"
    block = wire.encode({"x": [RunsCode(made)], "y": np.zeros((1, 2), np.complex64)})
    assert isinstance(block["x"].type, wire.ObjectType)
    path = tmp_path / "data.parquet"
    pq.write_table(block, path)
    index = list_parquet(str(path))
    read = index.reader.read(index.table)
    assert isinstance(read.columns["x"][0], bytes)
    assert np.asarray(read.columns["y"]).dtype == np.complex64
    assert not made.exists()
    forged = pa.field("z", pa.binary(1), metadata={
        b"ARROW:extension:name": b"offload.rows", b"ARROW:extension:metadata": pickle.dumps(RunsCode(made)),
    })  # fmt: skip
    table = pa.Table.from_arrays([pa.array([b"1"], pa.binary(1))], schema=pa.schema([forged]))
    with contextlib.suppress(Exception):  # whatever Arrow makes of it
        pq.write_table(table, path)
        pq.read_table(path)
    assert not made.exists()
