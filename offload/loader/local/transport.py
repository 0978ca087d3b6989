"""Messages between the program and its preprocessing processes.

A message is a pickle in one packet of a Unix socket. A large one lies in anonymous shared memory, whose descriptor travels instead, and so
do the contents of its arrays: the receiver maps them and copies nothing. Such memory needs no room in ``/dev/shm``, which containers limit
to 64 MB, and the kernel frees it with the last mapping, also if a process dies.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

PACKET_BYTES = 64 << 10  # of the largest message that travels in the packet itself; the kernel allows about 200 KiB
ALIGNMENT = 64  # bytes: vector instructions and a cache line
_LAYOUT = struct.Struct("=QQQ")  # the lengths of the pickle, of the sizes of contents, and of the whole memory
_INSIDE, _BESIDE = b"\0", b"\1"
_DESCRIPTOR_BYTES = array.array("i").itemsize


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection that keeps the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: object) -> None:
    """Send a message. Several threads may send on one connection.

    Raises OSError if the other end is closed, and what pickling raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    contents = [buffer.raw() for buffer in buffers]
    if not contents and len(body) < PACKET_BYTES:
        connection.send(_INSIDE + body)
        return
    sizes = pickle.dumps([content.nbytes for content in contents])
    parts: list[Any] = []
    for content in contents:
        parts += [content, bytes(-content.nbytes % ALIGNMENT)]
    memory = os.memfd_create("offload", os.MFD_CLOEXEC)
    try:
        size = sum(memoryview(part).nbytes for part in (*parts, body, sizes))
        _write(memory, [*parts, body, sizes])
        layout = _LAYOUT.pack(len(body), len(sizes), size)
        descriptor = array.array("i", [memory])
        connection.sendmsg([_BESIDE + layout], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
    finally:
        os.close(memory)


def receive(connection: socket.socket, *, wait: bool = True) -> Any:
    """The next message. Raises EOFError if the other end is closed, BlockingIOError if there is none and it should not ``wait``."""
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    try:
        packet, ancillary, _, _ = connection.recvmsg(PACKET_BYTES + 1, socket.CMSG_SPACE(_DESCRIPTOR_BYTES), flags)
    except ConnectionError as error:
        raise EOFError from error
    if not packet:
        raise EOFError
    if packet[:1] == _INSIDE:
        return pickle.loads(memoryview(packet)[1:])
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    memory = descriptors[0]
    try:
        body_bytes, sizes_bytes, size = _LAYOUT.unpack_from(packet, 1)
        # Unlike mmap.mmap, torch keeps no descriptor: a program may keep more batches than it may open files.
        mapped = torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=size, dtype=torch.uint8).numpy()
    finally:
        os.close(memory)
    sizes: list[int] = pickle.loads(mapped[size - sizes_bytes :].tobytes())
    body = mapped[size - sizes_bytes - body_bytes : size - sizes_bytes]
    buffers, at = [], 0
    for content_bytes in sizes:
        buffers.append(mapped[at : at + content_bytes])
        at += content_bytes + -content_bytes % ALIGNMENT
    return pickle.loads(body.tobytes(), buffers=buffers)


def _write(memory: int, parts: Sequence[Any]) -> None:
    for part in parts:
        left = memoryview(part).cast("B")
        while left:  # the kernel writes at most 2 GB at once
            left = left[os.write(memory, left) :]
