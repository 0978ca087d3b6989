"""What a fork of this process must not share with it: open files that tell others that this process lives, and objects whose end they see.

A fork has copies of all descriptors and objects of its parent, and may outlive it. It closes its copies of the files that are registered
here, so that a lock, a pipe or a port ends with the process that opened it. It keeps the objects that are registered here to its own end.

Where it stops: :mod:`offload.process.ray_forks` knows what belongs to Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Iterator
from typing import IO, Any, NoReturn, Protocol, TypeVar


class Closable(Protocol):
    """An open file or socket."""

    def close(self) -> None:
        """Close it."""


_File = TypeVar("_File", bound=Closable)
_Thing = TypeVar("_Thing")

# Weak: this must not keep alive what the process has finished with.
_closed: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def closes(file: _File) -> _File:
    """Let forks close their copy of an open file or socket. Return it."""
    _closed.add(file)
    return file


def locked_file(descriptor: int) -> IO[bytes]:
    """The open file of a descriptor, which forks close: the lock on it ends with this process."""
    return closes(open(descriptor, "r+b", buffering=0))


def keeps(thing: _Thing) -> _Thing:
    """Let forks keep an object to their end, since its end would reach beyond them. Return it."""
    _kept.add(thing)
    return thing


def keep(thing: object) -> None:
    """Keep an object to the end of this process, and beyond that of Python."""
    # One reference too many, which nobody ever drops.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextlib.contextmanager
def ending_here() -> Iterator[None]:
    """A context for a call of the user's code. A fork that leaves it ends: what follows is its parent's work."""
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            _end(error)
        raise
    if os.getpid() != pid:
        _end(None)


def _end(error: BaseException | None) -> NoReturn:
    """End this fork with the exit status of a program that has raised ``error``. Like processes of :mod:`multiprocessing`, it skips its
    parent's exit handlers: one of them would end other processes of the parent."""
    status = 1
    try:
        if error is None:
            status = 0
        elif not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            sys.stderr.write(f"{error.code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


def _after_fork() -> None:
    for thing in _kept:
        keep(thing)
    for file in list(_closed):
        with contextlib.suppress(Exception):
            file.close()
    _closed.clear()


os.register_at_fork(after_in_child=_after_fork)
