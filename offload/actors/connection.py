"""A connection between two processes of this machine, on which calls and answers travel.

Where it stops: :mod:`offload.actors.values` packs arguments and answers.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import cloudpickle

from offload.actors.errors import ProcessLostError
from offload.actors.values import Answer, Packed
from offload.process import forks
from offload.process.messages import packet, post, receive

ANSWER_BYTES = 1 << 20
"""The most bytes of an answer of which the program keeps no open file until it is needed."""


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
        """Call a method, and return so many answers. Does not wait. Raises what pickling the arguments raises, and
        OSError if the machine has no room for them."""
        number = next(self._numbers)
        ready = packet((number, method, Packed.of((tuple(args), dict(named))), answers))
        futures: list[Future[Packed]] = [Future() for _ in range(answers)]
        with self._lock:
            if self._lost is None:
                self._awaited[number] = futures
                with contextlib.suppress(OSError):  # the reader finds the end
                    post(self._link, *ready)
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
                self._settle(*receive(self._link))
        end = self._end()
        with self._lock:
            self._lost = end
            awaited, self._awaited = self._awaited, {}
        for futures in awaited.values():
            _fail(futures, ProcessLostError(end))
        self._link.close()

    def _settle(self, number: int, values: Sequence[Packed], error: bytes | None) -> None:
        futures = self._awaited.pop(number)
        if error is not None:
            _fail(futures, _loaded_error(error))
        for future, value in zip(futures, values, strict=False):
            future.set_result(value)


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

    def serve(self, run: Callable[..., Any] = lambda function, *args: function(*args)) -> None:
        """Answer calls until the caller is gone. ``run``: calls a function, here or on another thread."""
        with contextlib.suppress(EOFError, OSError), self._link:
            while True:
                run(self._answer, *receive(self._link))

    def _answer(self, number: int, method: str, packed: Packed, answers: int) -> None:
        try:
            ready = packet((number, self._values(method, packed, answers), None))
        except BaseException as raised:
            ready = packet((number, [], travelling(raised)))
        with contextlib.suppress(OSError):
            post(self._link, *ready)

    def _values(self, method: str, packed: Packed, answers: int) -> list[Packed]:
        args, named = packed.value()
        outcome = getattr(self._target, method)(*args, **named)
        return [Packed.of(value, small_bytes=ANSWER_BYTES) for value in (outcome if answers > 1 else (outcome,))]


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
