"""The objects and sockets that make up a connection to Ray, for a fork that must not use its parent's.

A fork calls this right after its start, when an import may wait for ever. So nothing is imported here that is not yet there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any

from offload.process import forks
from offload.ray_private.part import Part

WORKER, STATE = "ray._private.worker", "ray._private.state"
LOOPBACK = "127.0.0.1"

PART = Part(
    name="connection of a fork",
    purpose="cut a fork of a connected process off from the connection, so that the fork cannot harm it",
    without="a fork keeps what it inherits",
    cost="a fork that drops objects of Ray, or uses Ray, may end its parent's connection: start processes by spawn",
    needs=(
        f"{WORKER}:global_worker.set_is_connected",
        f"{WORKER}:global_worker.set_mode",
        f"{WORKER}:_global_node",
        f"{WORKER}:shutdown",
        "ray._private.node:Node.raylet_socket_name",
        "ray._private.node:Node.plasma_store_socket_name",
        f"{STATE}:state",
        "ray.experimental.internal_kv:global_gcs_client",
    ),
)


def is_connected() -> bool:
    """Return whether this process, or the one that it was forked from, is connected to Ray."""
    worker = getattr(sys.modules.get(WORKER), "global_worker", None)
    if hasattr(worker, "core_worker"):
        return True
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def cut_off(refuse: Callable[..., Any]) -> None:
    """Cut this fork off from its parent's connection. ``refuse`` stands in for ``ray.init``."""
    module: Any = sys.modules.get(WORKER)
    if module is None or PART.left_out():
        return
    # Each step matters even where a later Ray lacks what the other one needs.
    for step in (_leave_sockets, lambda worker: _forget(worker, refuse)):
        with contextlib.suppress(Exception):
            step(module)


def _leave_sockets(module: Any) -> None:
    """Let the copies of the sockets of the machine's node lead nowhere. The parent's stay as they are."""
    node = module._global_node or module.global_worker.node
    paths = {node.raylet_socket_name, node.plasma_store_socket_name}
    with _nowhere() as nowhere:
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if peer(number) in paths:
                    os.dup2(nowhere.fileno(), number, inheritable=False)


def peer(number: int) -> object:
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


def _forget(module: Any, refuse: Callable[..., Any]) -> None:
    """Leave Ray's modules as ``ray.shutdown()`` does, but keep all objects whose end would use the connection."""
    library: Any = sys.modules["ray"]
    worker = module.global_worker
    atexit.unregister(module.shutdown)
    library.init = module.init = refuse
    for holder, names in (
        (worker, ("core_worker", "gcs_client", "gcs_error_subscriber", "gcs_log_subscriber", "node")),
        (module, ("_global_node",)),
        (sys.modules[STATE].state, ("_global_state_accessor", "global_state_accessor", "_task_events_head_client")),
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
