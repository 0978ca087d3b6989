"""Keep forks of a process away from its connection to Ray, which they inherit and which does not survive their use of it.

A fork has copies of Ray's sockets, and of all objects that tell Ray of their end. Without this, a fork that drops a batch, or ends as
Python programs do, writes into the middle of the messages of its parent, and the node process (raylet) of the machine fails. It may also
wait forever for one of Ray's threads, which it does not have. So a fork begins as if Ray had been shut down: its copies of the
sockets lead nowhere, it keeps Ray's objects to its end, and its end skips the exit handlers of C++.

Where it stops: a fork cannot use Ray. Only this module knows which objects and sockets make up a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import stat
import sys
from typing import Any, NoReturn

from offload.errors import RunError
from offload.process import forks

WORKER = "ray._private.worker"
LOOPBACK = "127.0.0.1"
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
    module: Any = sys.modules.get(WORKER)
    worker = getattr(module, "global_worker", None)
    if worker is None or not hasattr(worker, "core_worker"):
        return
    _forked = True
    # Each step matters even where a later Ray lacks what another one needs.
    for step in (_leave_sockets, _forget, _end_without_cpp):
        with contextlib.suppress(Exception):
            step(module)


def _leave_sockets(module: Any) -> None:
    """Let the copies of the sockets of the machine's node lead nowhere. The parent's stay as they are."""
    node = module._global_node or module.global_worker.node
    paths = {node.raylet_socket_name, node.plasma_store_socket_name}
    with _nowhere() as nowhere:
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if _peer(number) in paths:
                    os.dup2(nowhere.fileno(), number, inheritable=False)


def _peer(number: int) -> object:
    """The address of the other end of a connection; None for other files."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return None
    with socket.socket(fileno=os.dup(number)) as copy:
        return copy.getpeername()


def _nowhere() -> socket.socket:
    """A socket that takes everything and gives nothing. Ray ends a process at once whose socket is closed."""
    nowhere = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    nowhere.bind((LOOPBACK, 0))
    nowhere.connect(nowhere.getsockname())  # the kernel drops what nobody reads
    nowhere.shutdown(socket.SHUT_RD)
    return nowhere


def _forget(module: Any) -> None:
    """Leave Ray's modules as ``ray.shutdown()`` does, but keep all objects whose end would use the connection."""
    library: Any = sys.modules["ray"]
    worker = module.global_worker
    atexit.unregister(module.shutdown)
    library.init = module.init = _refuse
    for holder, names in (
        (worker, ("core_worker", "gcs_client", "gcs_error_subscriber", "gcs_log_subscriber", "node")),
        (module, ("_global_node",)),
        (sys.modules["ray._private.state"].state, ("_global_state_accessor", "_task_events_head_client")),
        (sys.modules["ray.experimental.internal_kv"], ("global_gcs_client",)),
    ):
        for name in names:
            if name in vars(holder):
                forks.keep(vars(holder)[name])
                if name in ("core_worker", "gcs_client"):  # Ray asks whether there is one
                    delattr(holder, name)
                else:
                    setattr(holder, name, None)
    worker.set_is_connected(False)
    worker.set_mode(None)


def _refuse(*args: Any, **named: Any) -> NoReturn:
    check_not_forked()
    raise AssertionError


def _end_without_cpp(module: Any) -> None:
    """End this process without the exit handlers of C++, which wait for Ray's threads, but with all output written."""
    libc = ctypes.CDLL(None)
    for last_first in (libc._exit, libc.fcloseall):
        libc.on_exit(last_first, None)


os.register_at_fork(after_in_child=_after_fork)
