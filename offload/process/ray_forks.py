"""Keep forks of a process away from its connection to Ray, which they inherit and which does not survive their use of it.

A fork has copies of Ray's sockets, and of all objects that tell Ray of their end. Without this, a fork that drops a batch, or ends as
Python programs do, writes into the middle of the messages of its parent, and the node process (raylet) of the machine fails. It may also
wait forever for one of Ray's threads, which it does not have. So a fork begins as if Ray had been shut down: its copies of the
sockets lead nowhere, it keeps Ray's objects to its end, and its end skips the exit handlers of C++.

Where it stops: a fork cannot use Ray. :mod:`offload.ray_private.fork_cut` knows which objects and sockets make up a connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, NoReturn

from offload.errors import RunError
from offload.ray_private import fork_cut

_forked = False


def check_not_forked() -> None:
    """Raise RunError in a fork of a process that was connected to Ray."""
    if _forked:
        raise RunError(
            "this process was forked from one that is connected to Ray, and Ray does not survive a fork. Start processes with "
            'multiprocessing.get_context("spawn"), or fork before the first iteration or run.'
        )


def _after_fork() -> None:
    """Cut a fork off from its parent's connection to Ray, if there is one."""
    global _forked
    with contextlib.suppress(Exception):
        if fork_cut.is_connected():
            _forked = True
            fork_cut.cut_off(_refuse)
            _end_without_cpp()


def _refuse(*args: Any, **named: Any) -> NoReturn:
    check_not_forked()
    raise AssertionError


def _end_without_cpp() -> None:
    """End this process without the exit handlers of C++, which wait for Ray's threads, but with all output written."""
    libc = ctypes.CDLL(None)
    for last_first in (libc._exit, libc.fcloseall):
        libc.on_exit(last_first, None)


os.register_at_fork(after_in_child=_after_fork)
