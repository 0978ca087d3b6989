"""A connection between two processes of this machine, on which calls and answers travel.

Where it stops: :mod:`offload.actors.values` packs arguments and answers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import cloudpickle

from offload.actors.errors import ProcessLostError
from offload.actors.values import Answer, Packed
from offload.process import forks

HEADER = struct.Struct("!IH")
"""The bytes of a message after its header, and the number of descriptors that travel with it."""

MOST_DESCRIPTORS = 253  # the kernel's limit for one message
ANSWER_BYTES = 1 << 20
"""The most bytes of an answer that travel in a message. The process that waits for it always reads."""


def send(link: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send plain data, and open files with it. Raises OSError if nobody is there."""
    content = pickle.dumps(message)
    whole = memoryview(HEADER.pack(len(content), len(descriptors)) + content)
    sent = socket.send_fds(link, [whole], list(descriptors)) if descriptors else link.send(whole)
    link.sendall(whole[sent:])


def receive(link: socket.socket) -> tuple[Any, deque[int]]:
    """The next message, and the descriptors of the files that came with it. Raises EOFError at the end."""
    head, descriptors, _, _ = socket.recv_fds(link, HEADER.size, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    head += _exactly(link, HEADER.size - len(head)) if head else b""
    if not head:
        raise EOFError
    size, count = HEADER.unpack(head)
    message = pickle.loads(_exactly(link, size))
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("this process may open no more files (ulimit -n)")
    return message, deque(descriptors)


def _exactly(link: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = link.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return bytes(content)


class Calls:
    """The calling end of a connection. Several threads may call.

    Args:
        link: the connected socket.
        end: says how the other process has ended, once the connection breaks.
    """

    def __init__(self, link: socket.socket, end: Callable[[], str]) -> None:
        self._link, self._end = forks.closes(link), end
        self._numbers = itertools.count()
        self._awaited: dict[int, list[Future[Packed]]] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        threading.Thread(target=self._read, daemon=True, name="answers").start()

    def call(self, method: str, args: Sequence[Any], named: Mapping[str, Any], answers: int = 1) -> list[Answer]:
        """Call a method, and return so many answers. Does not wait. Raises what pickling the arguments raises."""
        packed = Packed.of((tuple(args), dict(named)))
        futures: list[Future[Packed]] = [Future() for _ in range(answers)]
        descriptors: list[int] = []
        flat = packed.flat(descriptors)
        with self._lock:
            if self._lost is None:
                number = next(self._numbers)
                self._awaited[number] = futures
                with contextlib.suppress(OSError):  # the reader finds the end
                    send(self._link, (number, method, flat, answers), descriptors)
            else:
                _fail(futures, ProcessLostError(self._lost))
        return [Answer(future) for future in futures]

    def close(self) -> None:
        """Call no more."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                (number, flats, error), descriptors = receive(self._link)
                futures = self._awaited.pop(number)
                if error is not None:
                    _fail(futures, _loaded_error(error))
                for future, flat in zip(futures, flats, strict=False):
                    future.set_result(Packed.from_flat(flat, descriptors.popleft))
        end = self._end()
        with self._lock:
            self._lost = end
            awaited, self._awaited = self._awaited, {}
        for futures in awaited.values():
            _fail(futures, ProcessLostError(end))
        self._link.close()


def _fail(futures: Sequence[Future[Packed]], error: BaseException) -> None:
    for future in futures:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)


def _loaded_error(error: bytes) -> BaseException:
    try:
        loaded = pickle.loads(error)
    except Exception as broken:  # the user's exception may need what this process lacks
        loaded = RuntimeError(f"an error that cannot be unpickled here: {broken}")
    return loaded if isinstance(loaded, BaseException) else RuntimeError(str(loaded))


class Answers:
    """The answering end of a connection. ``target``: its methods are called."""

    def __init__(self, link: socket.socket, target: Any) -> None:
        self._link, self._target = forks.closes(link), target
        self._sending = threading.Lock()

    def serve(self, run: Callable[..., Any] = lambda function, *args: function(*args)) -> None:
        """Answer calls until the caller is gone. ``run``: calls a function, here or on another thread."""
        with contextlib.suppress(EOFError, OSError), self._link:
            while True:
                (number, method, flat, answers), descriptors = receive(self._link)
                run(self._answer, number, method, Packed.from_flat(flat, descriptors.popleft), answers)

    def _answer(self, number: int, method: str, packed: Packed, answers: int) -> None:
        values: list[Packed] = []
        error: bytes | None = None
        try:
            args, named = packed.value()
            outcome = getattr(self._target, method)(*args, **named)
            several = outcome if answers > 1 else (outcome,)
            values = [Packed.of(value, small_bytes=ANSWER_BYTES) for value in several]
            del outcome, several, args, named
        except BaseException as raised:
            error = travelling(raised)
        descriptors: list[int] = []
        flats = [] if error is not None else [value.flat(descriptors) for value in values]
        with self._sending, contextlib.suppress(OSError):
            send(self._link, (number, flats, error), descriptors)


def travelling(error: BaseException) -> bytes:
    """A pickled exception; one with its name and message if it does not survive the way, or would end the caller."""
    try:
        if not isinstance(error, Exception):
            raise TypeError
        packed: bytes = cloudpickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # pickling runs the user's code
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed
