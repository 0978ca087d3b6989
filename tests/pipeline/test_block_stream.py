"""A block arrives as it was, or not at all. Its memory serves again once nobody sees it."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offload.pipeline.blocks import stream, whole_samples, wire
from offload.pipeline.blocks.memory import ReusedMemory
from offload.pipeline.blocks.stream import BrokenStreamError
from offload.pipeline.blocks.whole_samples import CONTENTS

ROWS = 300
HEAD = stream._HEAD.pack

Ends = tuple[socket.socket, socket.socket]


def connected() -> Ends:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = connected()
    with here, there:
        yield here, there


def memory(size: int) -> Any:
    return np.empty(size, np.uint8)


def sent(ends: Ends, block: pa.Table, into: Callable[[int], Any] = memory) -> pa.Table:
    here, there = ends

    def send() -> None:
        stream.send(here, block)
        here.close()

    sender = threading.Thread(target=send)
    sender.start()
    with there:
        found = stream.receive(there, into)
    sender.join()
    return found


BLOCKS = {
    "no rows": wire.encode({"x": np.zeros((0, 3), np.float32)}),
    "no columns": pa.table({}),
    "numbers, text and objects": wire.encode(
        {
            "image": np.random.default_rng(0).integers(0, 255, (ROWS, 3, 64, 64), np.uint8),
            "label": np.arange(ROWS),
            "half": np.ones((ROWS, 2), np.float16),
            "complex": np.ones(ROWS, np.complex64),
            "text": [str(row) * row for row in range(ROWS)],
            "bytes": [bytes(row) for row in range(ROWS)],
            "none": [None if row % 2 else "x" for row in range(ROWS)],
            "object": [{row: (row,)} for row in range(ROWS)],
        }
    ),
    "whole samples": pa.table(whole_samples.encode([[np.arange(1000 + row), {"row": row}] for row in range(ROWS)])),
    "a part of a block": wire.encode({"x": np.arange(ROWS * 10.0).reshape(ROWS, 10)}).slice(17, 5),
    "several parts": pa.concat_tables([pa.table({"x": [1.0, 2.0]}), pa.table({"x": [3.0]})]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_arrives_as_it_was(ends: Ends, name: str) -> None:
    block = BLOCKS[name]
    found = sent(ends, block)
    assert found.schema == block.schema
    assert found.equals(block)
    if "x" in block.column_names or "image" in block.column_names:
        for column, values in wire.decode(block).items():
            np.testing.assert_array_equal(wire.decode(found)[column], values)


OBJECTS: dict[str, Any] = {
    "nothing": None,
    "a structure": {"a": [1, (2.5, "text")], "b": b"bytes"},
    "arrays": [np.arange(1000), np.zeros((0, 3)), np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.arange(10)[::2]],
    "many arrays": [np.full(number, number, np.uint8) for number in range(200)],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_any_object_arrives_as_it_was(ends: Ends, name: str) -> None:
    found, expected = sent(ends, OBJECTS[name]), OBJECTS[name]
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)
    if "array" in name:
        assert all(each.flags.writeable and each.flags.aligned for each in found)


def test_the_contents_of_an_object_lie_in_the_memory_that_serves_again() -> None:
    reused = ReusedMemory(1 << 30)
    view = sent(connected(), {"x": np.zeros(100_000)}, reused.lend)["x"][5:7]
    second = sent(connected(), {"x": np.ones(100_000)}, reused.lend)["x"]
    assert (view == 0).all(), "the view kept its memory"
    where = second.ctypes.data
    del second
    gc.collect()
    third = sent(connected(), {"x": np.full(100_000, 2.0)}, reused.lend)["x"]
    assert third.ctypes.data == where
    del view, third
    gc.collect()
    assert reused.lent_bytes() == 0


@pytest.mark.parametrize("content", [b"", b"abc", HEAD(0, 100) + b"too little"])
def test_a_connection_that_ends_too_early(ends: Ends, content: bytes) -> None:
    here, there = ends
    here.sendall(content)
    here.close()
    with pytest.raises(BrokenStreamError, match="bytes too early"):
        stream.receive(there, memory)


def test_what_is_no_block(ends: Ends) -> None:
    here, there = ends
    here.sendall(HEAD(0, 16) + bytes(range(16)))
    here.close()
    with pytest.raises(pa.ArrowException):
        stream.receive(there, memory)


def test_a_connection_without_progress(ends: Ends) -> None:
    _, there = ends
    stream.time_out(there, 0.05)
    with pytest.raises(OSError, match="temporarily unavailable"):
        stream.receive(there, memory)


def test_memory_serves_again_only_once_no_view_is_left() -> None:
    reused = ReusedMemory(1 << 30)
    blocks = [wire.encode({"x": np.full((ROWS, 1000), number)}) for number in range(3)]
    view = wire.decode(sent(connected(), blocks[0], reused.lend))["x"][5:7]
    gc.collect()
    second = wire.decode(sent(connected(), blocks[1], reused.lend))["x"]
    assert (view == 0).all(), "the view kept its memory"
    where = second.ctypes.data
    del second
    gc.collect()
    third = wire.decode(sent(connected(), blocks[2], reused.lend))["x"]
    assert third.ctypes.data == where
    assert (view == 0).all()
    assert (third == 2).all()


def test_a_call_that_sends_a_part_is_followed_by_others() -> None:
    """The time limit of a connection is that of one call. `sendall` would have it for the whole block."""
    sent: list[bytes] = []

    class Slow:
        def setsockopt(self, *option: int) -> None: ...

        def sendall(self, content: Any) -> None:
            assert len(content) <= len(HEAD(0, 0))
            sent.append(bytes(content))

        def send(self, content: Any) -> int:
            sent.append(bytes(content[:100_000]))
            return len(sent[-1])

    block = pa.table({"x": np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)})
    stream.send(Slow(), block)  # type: ignore[arg-type]
    here, there = connected()
    with there:
        sender = threading.Thread(target=lambda: (here.sendall(b"".join(sent)), here.close()))
        sender.start()
        assert stream.receive(there, memory).equals(block)
        sender.join()


def test_a_part_of_a_block_takes_as_many_bytes_as_it_has() -> None:
    """Ranks on one node may each take a part of the same block."""
    block = BLOCKS["numbers, text and objects"].append_column("samples", BLOCKS["whole samples"].column(CONTENTS))

    def size_of(part: pa.Table) -> int:
        sink = pa.MockOutputStream()
        stream._write(sink, part)
        return int(sink.size())

    parts = [block.slice(start, 30) for start in range(0, ROWS, 30)]
    assert sum(map(size_of, parts)) < 1.1 * size_of(block)


def test_a_connection_that_broke_while_sending(ends: Ends) -> None:
    here, there = ends
    there.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset|broken"):
        stream.send(here, pa.table({"x": np.zeros(10 << 20)}))


def test_it_keeps_no_more_memory_than_it_may() -> None:
    reused = ReusedMemory(3500)
    lent = [reused.lend(1000) for _ in range(5)]
    assert reused.lent_bytes() == 5 * 1125
    places = [each.ctypes.data for each in lent]
    lent.clear()
    gc.collect()
    assert reused.lent_bytes() == 0
    again = [reused.lend(1000) for _ in range(3)]
    assert len({each.ctypes.data for each in again} & set(places)) == 3
    assert len(reused.lend(400)) == 400


def test_memory_that_comes_back_while_some_is_taken_is_counted() -> None:
    reused = ReusedMemory(1 << 20)
    lent = reused.lend(1000)
    with reused._lock:
        del lent  # as the garbage collector may do at any time
    assert reused.lent_bytes() == 0
