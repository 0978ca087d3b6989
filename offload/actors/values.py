"""Values on their way between processes of this machine.

A value is pickled, and its arrays lie beside the pickle. Small ones travel in the message, large ones in a file in memory, of which each
process maps the same pages. The kernel counts the references to such a file: it is gone with the last process that uses it, however that
process ends.

Where it stops: :mod:`offload.actors.connection` carries messages.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle

SMALL_BYTES = 64 << 10
"""The most bytes of a value that travel in a message by default."""

ALIGNMENT = 64  # bytes: what Arrow and NumPy compute fastest with

_nesting = threading.local()


class Memory:
    """A file in memory. ``descriptor``: of the file, which this object closes at its end."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    @classmethod
    def of(cls, parts: Sequence[memoryview], offsets: Sequence[int], size: int) -> Memory:
        """A new file with these parts at these offsets. Raises OSError if the machine has no room for it, or for another open file."""
        memory = cls(os.memfd_create("offload", os.MFD_CLOEXEC), size)
        os.truncate(memory.descriptor, size)
        for part, offset in zip(parts, offsets, strict=True):
            while part:
                written = os.pwrite(memory.descriptor, part, offset)
                part, offset = part[written:], offset + written
        return memory

    def mapped(self) -> memoryview:
        """Its content, as long as somebody refers to it."""
        return memoryview(mmap.mmap(self.descriptor, self.size))

    def __del__(self) -> None:
        os.close(self.descriptor)


class Packed:
    """A value as bytes.

    Args:
        sizes: the bytes of its parts, the pickle first.
        content: the parts, each at a multiple of :data:`ALIGNMENT`, or the memory that holds them so.
        inner: the values to whose references this value refers.
        key: a text that differs for every value. It stays the same on its way.
    """

    def __init__(self, sizes: Sequence[int], content: bytes | Memory, inner: Sequence[Packed], key: str = "") -> None:
        self.sizes, self.content, self.inner = tuple(sizes), content, tuple(inner)
        self.key = key or uuid.uuid4().hex

    @classmethod
    def of(cls, value: Any, *, small_bytes: int = SMALL_BYTES) -> Packed:
        """Pack a value. Raises what its pickling raises."""
        buffers: list[pickle.PickleBuffer] = []
        outer, _nesting.inner = getattr(_nesting, "inner", None), dict[int, Packed]()
        try:
            head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            inner = tuple(_nesting.inner.values())
        finally:
            _nesting.inner = outer
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        *offsets, size = _offsets(sizes)
        if size > small_bytes:
            return cls(sizes, Memory.of(parts, offsets, size), inner)
        content = bytearray(size)
        for part, offset in zip(parts, offsets, strict=True):
            content[offset : offset + part.nbytes] = part
        return cls(sizes, bytes(content), inner)

    def value(self) -> Any:
        """The value anew. Its arrays lie in the memory that all processes share."""
        whole = self.content.mapped() if isinstance(self.content, Memory) else memoryview(self.content)
        parts = [whole[at : at + size] for at, size in zip(_offsets(self.sizes), self.sizes, strict=False)]
        outer, _nesting.opened = getattr(_nesting, "opened", None), self.inner
        try:
            return pickle.loads(parts[0], buffers=parts[1:])
        finally:
            _nesting.opened = outer

    def flat(self, descriptors: list[int]) -> tuple[Any, ...]:
        """The same as plain data. The descriptors of its memory are appended to ``descriptors``."""
        content: bytes | int = self.content if isinstance(self.content, bytes) else self.content.size
        if isinstance(self.content, Memory):
            descriptors.append(self.content.descriptor)
        return self.sizes, content, tuple(packed.flat(descriptors) for packed in self.inner), self.key

    @classmethod
    def from_flat(cls, flat: tuple[Any, ...], next_descriptor: Callable[[], int]) -> Packed:
        """The value that :meth:`flat` has made plain, from the descriptors in the same order."""
        sizes, content, inner, key = flat
        own = content if isinstance(content, bytes) else Memory(next_descriptor(), content)
        return cls(sizes, own, [cls.from_flat(each, next_descriptor) for each in inner], key)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another packed value, a reference to the same memory; elsewhere, such as in a file, all of its bytes."""
        if (inner := getattr(_nesting, "inner", None)) is not None:
            inner[id(self)] = self
            return _opened, (list(inner).index(id(self)),)
        content = bytes(self.content.mapped()) if isinstance(self.content, Memory) else self.content
        return Packed, (self.sizes, content, self.inner, self.key)


def _opened(number: int) -> Packed:
    packed: Packed = _nesting.opened[number]
    return packed


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and the size of all."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


class Answer:
    """A value that another process makes, or has made. It can be sent to other processes once it is there."""

    def __init__(self, packed: Future[Packed]) -> None:
        self._packed = packed

    @classmethod
    def of(cls, value: Any) -> Answer:
        """A value that is there."""
        packed: Future[Packed] = Future()
        packed.set_result(Packed.of(value))
        return cls(packed)

    def done(self) -> bool:
        """Return whether it is there, or never will be."""
        return self._packed.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it. Raises the error that the other process has raised, and ProcessLostError."""
        return self._packed.result(timeout).value()

    def future(self) -> Future[Any]:
        """The value as a future."""
        value: Future[Any] = Future()

        def settle(packed: Future[Packed]) -> None:
            try:
                value.set_result(packed.result().value())
            except BaseException as error:  # unpickling runs the user's code
                value.set_exception(error)

        self._packed.add_done_callback(settle)
        return value

    def hex(self) -> str:
        """A text that differs for every value, once it is there. In all processes it is the same."""
        return self._packed.result(0).key

    def __reduce__(self) -> tuple[Any, ...]:
        return _answered, (self._packed.result(0),)


def _answered(packed: Packed) -> Answer:
    future: Future[Packed] = Future()
    future.set_result(packed)
    return Answer(future)
