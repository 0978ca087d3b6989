"""Values in memory that processes of this machine share.

A value is taken apart into parts, its pickle and the arrays beside it. Large ones lie in a file in memory (``memfd``), of which each
process maps the same pages. The kernel counts the uses of such a file, open descriptors and mappings alike: it is gone with the last of
them, however a process ends. It needs no room in ``/dev/shm``, which containers limit to 64 MB.

Where it stops: :mod:`offload.process.messages` brings them to other processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Part: TypeAlias = bytes | memoryview

ALIGNMENT = 64  # bytes: what Arrow and NumPy compute fastest with

_SIZE = struct.Struct("=Q")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Travelling(threading.local):
    """The memories in the value that this thread packs, if it does, and in the one that it unpacks."""

    packed: list[Memory] | None = None
    unpacked: Sequence[Memory] = ()


_travelling = _Travelling()


class Memory:
    """A file in memory that holds parts, each at a multiple of :data:`ALIGNMENT`. Their number and their sizes stand first.

    ``descriptor``: of the file, which this object closes at its end.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Memory:
        """A new file with these parts. Raises OSError if the machine has no room for it, or for another open file."""
        sizes = [len(part) for part in parts]
        table = struct.pack(f"={1 + len(sizes)}Q", len(sizes), *sizes)
        *offsets, size = _offsets((len(table), *sizes))
        memory = cls(os.memfd_create("offload", os.MFD_CLOEXEC))
        os.truncate(memory.descriptor, size)
        for part, offset in zip((table, *parts), offsets, strict=True):
            rest = memoryview(part)
            while rest:  # the kernel writes at most 2 GB at once
                written = os.pwrite(memory.descriptor, rest, offset)
                rest, offset = rest[written:], offset + written
        return memory

    def parts(self) -> list[memoryview]:
        """The parts, where they lie. They stay there as long as somebody refers to one of them, also without this object."""
        whole = np.asarray(_Mapping(self.descriptor, os.fstat(self.descriptor).st_size)).data
        (count,) = _SIZE.unpack_from(whole)
        sizes = struct.unpack_from(f"={count}Q", whole, _SIZE.size)
        _, *offsets, _ = _offsets((_SIZE.size * (1 + count), *sizes))
        return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def __del__(self) -> None:
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a packed value, a reference to the same memory; elsewhere, such as in a file, all of its bytes."""
        if (memories := _travelling.packed) is None:
            return Memory.of, ([bytes(part) for part in self.parts()],)
        memories.append(self)
        return _unpacked, (len(memories) - 1,)


def _unpacked(number: int) -> Memory:
    return _travelling.unpacked[number]


def pack(value: Any, dumps: Callable[..., bytes] = pickle.dumps) -> tuple[list[Part], list[Memory]]:
    """A value as its parts, the pickle first, and the memories to which it refers. Raises what pickling raises."""
    buffers: list[pickle.PickleBuffer] = []
    memories: list[Memory] = []
    outer, _travelling.packed = _travelling.packed, memories
    try:
        head = dumps(value, protocol=5, buffer_callback=buffers.append)
    finally:
        _travelling.packed = outer
    return [head, *(buffer.raw() for buffer in buffers)], memories


def unpack(parts: Sequence[Part], memories: Sequence[Memory]) -> Any:
    """The value that :func:`pack` has taken apart. Its arrays lie in the parts."""
    outer, _travelling.unpacked = _travelling.unpacked, memories
    try:
        return pickle.loads(parts[0], buffers=parts[1:])
    finally:
        _travelling.unpacked = outer


class _Mapping:
    """A file as memory of this process, in the form of NumPy's array interface.

    Unlike :class:`mmap.mmap`, it keeps no descriptor: a program may keep more batches than it may open files.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        self._place = None if address == _FAILED else (address, size)
        if self._place is None:
            raise OSError(ctypes.get_errno(), f"this process cannot use {size} bytes more of memory")
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size,), "typestr": "|u1"}

    def __del__(self, unmap: Any = _libc.munmap) -> None:
        if self._place is not None:
            unmap(*self._place)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and the size of all."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets
