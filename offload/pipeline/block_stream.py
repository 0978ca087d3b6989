"""A block on a TCP connection: its size, and the block as an Arrow stream.

Where it stops: who may connect to whom is :mod:`offload.pipeline.block_sender`'s and the receiver's business.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from offload.pipeline.reused_memory import Bytes

_SIZE = struct.Struct("!Q")
_RECEIVED_BYTES = 4 << 20  # per call: after each, the thread must get Python's lock again
_WAKING_BYTES = 512 << 10  # wakes the receiving thread: each time costs as much as copying 20 kB


class BrokenStreamError(OSError):
    """The connection ended before the block did."""


def send(connection: socket.socket, block: pa.Table) -> None:
    """Send a block, from the memory in which it lies. Raises OSError; TimeoutError if the connection's limit passes without progress."""
    size = pa.MockOutputStream()
    _write(size, block)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the small end of a stream must not wait
    connection.sendall(_SIZE.pack(size.size()))
    with pa.PythonFile(_Sink(connection), mode="w") as sink:
        _write(sink, block)


def receive(connection: socket.socket, memory: Callable[[int], Bytes]) -> pa.Table:
    """A block that :func:`send` sends. ``memory``: returns memory for so many bytes. Raises OSError; BrokenStreamError if it is not
    complete."""
    # A call also returns when the connection ends or its time limit passes.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKING_BYTES)
    head = bytearray(_SIZE.size)
    _fill(connection, memoryview(head))
    (size,) = _SIZE.unpack(head)
    content = memory(size)
    _fill(connection, content.data)
    with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
        return stream.read_all()


def time_out(connection: socket.socket, seconds: float) -> None:
    """Limit the waiting of each receiving call to so many seconds. The first call that gets nothing meanwhile fails. Unlike ``settimeout``,
    this lets one call receive many packets."""
    connection.settimeout(None)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    )


def _fill(connection: socket.socket, content: memoryview) -> None:
    while len(content):
        if not (count := connection.recv_into(content[:_RECEIVED_BYTES], 0, socket.MSG_WAITALL)):
            raise BrokenStreamError(f"the connection ended {len(content)} bytes too early")
        content = content[count:]


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
        self._broken = True
        while len(rest):
            rest = rest[self._connection.send(rest) :]  # not sendall: its time limit would count for all of it
        self._broken = False
        return len(content)

    def flush(self) -> None: ...

    def close(self) -> None: ...
