"""Actors as processes of this machine, and an object of this process that other processes call.

Both are called as Ray's actors are: ``actor.method.remote(...)`` returns an :class:`offload.actors.values.Answer` at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from typing import Any

from offload.actors.connection import Answers, Calls
from offload.actors.starter import Started, Starter, how_ended
from offload.process import forks
from offload.process.exits import how_it_ended

PEER = struct.Struct("3i")  # struct ucred: process, user and group


class Method:
    """A method of an actor. ``answers``: as how many answers its result comes, if it is a sequence of so many values."""

    def __init__(self, calls: Calls, name: str, answers: int = 1) -> None:
        self._calls, self._name, self._answers = calls, name, answers

    def options(self, *, num_returns: int) -> Method:
        """The same method with so many answers."""
        return Method(self._calls, self._name, num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        """Call it. Return its answer, or its answers, at once."""
        answers = self._calls.call(self._name, args, named, self._answers)
        return answers if self._answers > 1 else answers[0]


class Actor:
    """A process of this machine with an object of a class, whose methods are called here, one after the other."""

    def __init__(self, started: Started, title: str) -> None:
        self._started, self._title = started, title
        self._calls = Calls(started.link, self.how_ended)

    def how_ended(self) -> str:
        """How the process has ended, in words. Waits until it has."""
        status = how_ended(self._started)
        return f"{self._title} {'has ended' if status is None else how_it_ended(status)}"

    @property
    def pid(self) -> int:
        """Its process id. Waits until it runs."""
        return self._started.pid.result()

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal. Waits until it has ended; None if nobody can tell."""
        return how_ended(self._started)

    def kill(self) -> None:
        """End the process at once."""
        self._started.kill()

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self._calls, name)


def start_actor(starter: Starter, actor_class: type, *args: Any, title: str) -> Actor:
    """Start a process with an object of this class. Returns at once. ``title``: what messages call the process.

    If the class raises, so does every call.
    """
    actor = Actor(starter.start(), title)
    actor._calls.call("become", (actor_class, args), {})
    return actor


class _Body:
    """The object of an actor's process, once it is made, or the error of its making."""

    def __init__(self) -> None:
        self._target: Any = None
        self._error: Exception | None = None

    def become(self, actor_class: type, args: tuple[Any, ...]) -> None:
        try:
            self._target = actor_class(*args)
        except Exception as error:
            self._error = error

    def __getattr__(self, name: str) -> Any:
        if self._error is not None:
            raise self._error
        return getattr(self._target, name)


def answer_calls(link: socket.socket) -> None:
    """The main function of an actor's process."""
    Answers(link, _Body()).serve()


class Served:
    """An object of this process, which other processes of the same user call through :attr:`handle`.

    Each call has a thread of its own: some wait for long.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        name = f"\0offload-{secrets.token_hex(16)}"  # of the kernel, not of a file: it ends with this process
        self._listener = forks.closes(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind(name)
        self._listener.listen(128)
        self._links: list[socket.socket] = []
        self.handle = Handle(name)
        threading.Thread(target=self._accept, daemon=True, name="callers").start()

    def close(self) -> None:
        """Answer no more."""
        for link in [self._listener, *self._links]:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                link, _ = self._listener.accept()
                _, user, _ = PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
                if user != os.geteuid():
                    link.close()
                    continue
                self._links.append(link)
                serve = Answers(link, self._target).serve
                threading.Thread(target=serve, args=(_on_a_thread,), daemon=True, name="caller").start()


def _on_a_thread(function: Any, *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True, name="call").start()


class Handle:
    """A served object, for other processes. Each connects with its first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Calls | None = None
        self._connecting = threading.Lock()

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self._connected(), name)

    def _connected(self) -> Calls:
        with self._connecting:
            if self._calls is None:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with contextlib.suppress(OSError):  # gone: so every call says
                    link.connect(self._name)
                self._calls = Calls(link, lambda: "the program that drives this run has ended")
            return self._calls

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self._name,)
