"""A block on a TCP connection: a table as an Arrow stream, any other object as a pickle with the contents beside it.

Where it stops: who may connect to whom is :mod:`offload.pipeline.blocks.sender`'s and the receiver's business. A pickle runs code, as Ray's
own connections do.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from offload.pipeline.blocks.memory import Bytes

_HEAD = struct.Struct("!QQ")  # the number of a pickle's parts, 0 for a table, and the bytes that follow
_SIZE_BYTES = 8  # bytes that hold a part's size
_ALIGNED_BYTES = 64  # each part begins at a multiple, as contents do in the object store
_RECEIVED_BYTES = 4 << 20  # per call: after each, the thread must get Python's lock again
_WAKING_BYTES = 512 << 10  # bytes that wake the receiving thread: waking it costs as much as copying 20 kB


class BrokenStreamError(OSError):
    """The connection ended before the block did."""


def send(connection: socket.socket, block: Any) -> None:
    """Send a block, from the memory in which it lies. Raises OSError; TimeoutError if the connection's limit passes without progress."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the small end of a stream must not wait
    if not isinstance(block, pa.Table):
        _send_pickle(connection, block)
        return
    # The receiver must know the size before it takes memory. Writing to nowhere copies nothing.
    size = pa.MockOutputStream()
    _write(size, block)
    connection.sendall(_HEAD.pack(0, size.size()))
    with pa.PythonFile(_Sink(connection), mode="w") as sink:
        _write(sink, block)


def receive(connection: socket.socket, memory: Callable[[int], Bytes]) -> Any:
    """Receive a block that :func:`send` sends. ``memory``: returns memory for a number of bytes.

    Raises OSError, and BrokenStreamError if the block is not complete.
    """
    # A call also returns when the connection ends or its time limit passes.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKING_BYTES)
    head = bytearray(_HEAD.size)
    _fill(connection, memoryview(head))
    parts, size = _HEAD.unpack(head)
    content = memory(size)
    _fill(connection, content.data)
    if parts:
        return _unpickled(content, parts)
    with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
        return stream.read_all()


def time_out(connection: socket.socket, seconds: float) -> None:
    """Limit how long each receiving call waits. A call that gets nothing in this time fails.

    Unlike ``settimeout``, this lets one call receive many packets.
    """
    connection.settimeout(None)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    )


def _fill(connection: socket.socket, content: memoryview) -> None:
    while len(content):
        if not (count := connection.recv_into(content[:_RECEIVED_BYTES], 0, socket.MSG_WAITALL)):
            raise BrokenStreamError(f"the connection ended {len(content)} bytes too early")
        content = content[count:]


def _send_pickle(connection: socket.socket, block: Any) -> None:
    beside: list[pickle.PickleBuffer] = []
    structure = cloudpickle.dumps(block, protocol=5, buffer_callback=beside.append)
    parts = [structure, *(buffer.raw() for buffer in beside)]
    sizes = np.array([len(part) for part in parts], np.uint64)
    starts, end = _places(sizes)
    sink = _Sink(connection)
    sink.write(_HEAD.pack(len(parts), end) + sizes.tobytes())
    at = sizes.nbytes
    for part, start in zip(parts, starts, strict=True):
        # Padding up to the next aligned start.
        sink.write(bytes(start - at))
        sink.write(part)
        at = start + len(part)


def _unpickled(content: Bytes, parts: int) -> Any:
    sizes = np.frombuffer(content[: parts * _SIZE_BYTES], np.uint64)
    starts, _ = _places(sizes)
    structure, *beside = (content[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True))
    return pickle.loads(structure.data, buffers=beside)


def _places(sizes: np.ndarray[Any, Any]) -> tuple[list[int], int]:
    """Where each part begins, after the sizes of all, and where the last one ends."""
    starts, end = [], len(sizes) * _SIZE_BYTES
    for size in map(int, sizes):
        starts.append(-(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        end = starts[-1] + size
    return starts, end


def _write(sink: Any, block: pa.Table) -> None:
    with pa.ipc.new_stream(sink, block.schema) as stream:
        stream.write_table(block)


class _Sink:
    """A connection as a file that Arrow writes. It copies nothing."""

    closed = False

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._broken = False

    def write(self, content: Any) -> int:
        if self._broken:  # Arrow ends a stream that has failed
            raise BrokenStreamError("the connection is broken")
        rest = memoryview(content)
        # Broken until the opposite is proven: a part of the content may be on its way when an error comes.
        self._broken = True
        while len(rest):
            rest = rest[self._connection.send(rest) :]  # not sendall: its time limit would count for all of it
        self._broken = False
        return len(content)

    def flush(self) -> None: ...

    def close(self) -> None: ...
