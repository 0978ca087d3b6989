"""Messages between processes of this machine.

A message is a pickle in one packet of a Unix socket, so that several threads may send. A large one lies in memory that travels instead, and
so do the contents of its arrays: the receiver maps them and copies nothing.

Where it stops: :mod:`offload.actors` and :mod:`offload.loader.local` say what is sent.
"""

from __future__ import annotations

import array
import errno
import socket
from collections.abc import Sequence
from typing import Any

from offload.process.memory import Memory, pack, unpack

PACKET_BYTES = 64 << 10  # of the largest message that travels in the packet itself; the kernel allows about 200 KiB
MOST_MEMORIES = 253  # open files of a packet: the kernel's limit

_INSIDE, _BESIDE = b"\0", b"\1"
_DESCRIPTOR_BYTES = array.array("i").itemsize


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection that keeps the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError if the other end is closed, and what :func:`packet` raises."""
    post(link, *packet(message))


def packet(message: Any) -> tuple[bytes, Sequence[Memory]]:
    """A message ready to be sent. Raises what pickling raises, and OSError if the machine has no room for it."""
    parts, memories = pack(message)
    if len(parts) == 1 and len(parts[0]) < PACKET_BYTES:
        content = _INSIDE + bytes(parts[0])
    else:
        content, memories = _BESIDE, [Memory.of(parts), *memories]
    if len(memories) > MOST_MEMORIES:
        raise OSError(
            errno.E2BIG, f"a message to another process cannot refer to more than {MOST_MEMORIES} large values"
        )
    return content, memories


def post(link: socket.socket, content: bytes, memories: Sequence[Memory]) -> None:
    """Send what :func:`packet` has made ready. Raises OSError if the other end is closed."""
    if memories:
        socket.send_fds(link, [content], [memory.descriptor for memory in memories])
    else:
        link.send(content)


def receive(link: socket.socket, *, wait: bool = True) -> Any:
    """The next message.

    Raises:
        EOFError: if the other end is closed.
        BlockingIOError: if there is none, and this should not ``wait``.
        OSError: if this process may not open the memory that came along.
    """
    how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    try:  # not socket.recv_fds: it drops its flags
        content, came, flags, _ = link.recvmsg(
            1 + PACKET_BYTES, socket.CMSG_LEN(MOST_MEMORIES * _DESCRIPTOR_BYTES), how
        )
    except ConnectionError as error:
        raise EOFError from error
    if not content:
        raise EOFError
    descriptors = array.array("i")
    for _, _, descriptor_bytes in came:
        descriptors.frombytes(descriptor_bytes[: len(descriptor_bytes) // _DESCRIPTOR_BYTES * _DESCRIPTOR_BYTES])
    memories = [Memory(descriptor) for descriptor in descriptors]
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "this process may open no more files: raise their limit (ulimit -n)")
    if content == _BESIDE:
        return unpack(memories[0].parts(), memories[1:])
    return unpack([memoryview(content)[1:]], memories)
