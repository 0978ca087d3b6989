"""Values on their way between processes of this machine.

Small ones travel in the message, large ones as references to memory that all processes share (:mod:`offload.process.memory`). Such a
reference goes on to other processes without a copy.

Where it stops: :mod:`offload.actors.connection` carries messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle

from offload.process.memory import Memory, pack, unpack

SMALL_BYTES = 64 << 10
"""The most bytes of a value that travel in a message by default."""


class Packed:
    """A value as bytes.

    Args:
        content: its parts, the pickle first, or the memory that holds them.
        memories: those of other values, to whose references this value refers.
        key: a text that differs for every value. It stays the same on its way.
    """

    def __init__(self, content: Sequence[bytes] | Memory, memories: Sequence[Memory], key: str) -> None:
        self.content, self.memories, self.key = content, memories, key

    @classmethod
    def of(cls, value: Any, *, small_bytes: int = SMALL_BYTES) -> Packed:
        """Pack a value. Raises what its pickling raises."""
        parts, memories = pack(value, cloudpickle.dumps)
        small = sum(map(len, parts)) <= small_bytes
        return cls([bytes(part) for part in parts] if small else Memory.of(parts), memories, uuid.uuid4().hex)

    def value(self) -> Any:
        """The value anew. Its arrays lie in the memory that all processes share."""
        return unpack(self.content.parts() if isinstance(self.content, Memory) else self.content, self.memories)


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
