"""The processes that Ray runs of: starting them undisturbed, watching those that nothing goes on without, and ending what is left of
them. What is private to Ray about that is touched here alone.

Where it stops: a cluster that others started is watched, and never ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
import ray._private.services
import ray._private.utils
import ray._private.worker

MARK = "OFFLOAD_RAY"  # in the environment of every process of a Ray that is started here, and of those that they start
RECONNECT = (
    "gcs_rpc_server_reconnect_timeout_s"  # Ray's name for how long processes look for a control process that is gone
)
AWAY_S = 10.0  # the same, here; Ray's own minute is for a control process that is started again, which nobody does here
REACH_S = 2.0
LOOK_S = 1.0
GRACE_S = 1.5  # for processes that notice by themselves that their Ray has ended
KILL_S = 3.0
NAMES = {"gcs_server": "control process (gcs_server)", "raylet": "node process (raylet)"}


def new_mark() -> str:
    """What is to tell the processes of one Ray from all others."""
    return secrets.token_hex(16)


def start_local(mark: str, **options: Any) -> None:
    """Start a Ray on this machine, whose processes carry ``mark``, and connect to it."""
    os.environ[MARK] = mark
    try:
        with _undisturbed():
            ray.init(address="local", _system_config={RECONNECT: int(AWAY_S)}, **options)
    finally:
        del os.environ[MARK]


def join(address: str, **options: Any) -> None:
    """Connect to the cluster at ``address``."""
    with _undisturbed():
        ray.init(address=address, **options)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, ``ray.init`` leaves SIGTERM to its caller, starts processes that a terminal's Ctrl-C and end do not reach (Ray shields
    them from Ctrl-C alone), and starts nobody who prints what raylets have to say of workers that died: a run says that itself, and
    Ray's words are in its logs."""
    instead: list[tuple[Any, str, Any]] = [
        (ray._private.utils, "set_sigterm_handler", lambda handler: None),
        (ray._private.worker, "listen_error_messages", lambda worker, threads_stopped: None),
        (ray._private.services, "ConsolePopen", functools.partial(subprocess.Popen, start_new_session=True)),
    ]
    kept = [(module, name, getattr(module, name)) for module, name, _ in instead]
    try:
        for module, name, value in instead:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def end_marked(mark: str, grace_s: float = GRACE_S) -> None:
    """Kill the processes of a Ray that was started here, as far as they do not end by themselves."""
    began = time.monotonic()
    while (left := _marked(mark)) and time.monotonic() - began < grace_s + KILL_S:
        if time.monotonic() - began >= grace_s:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.05)


def kill_marked(mark: str) -> None:
    """The same at once, Ray's own processes first: what they would start is not started then."""
    kill_own()
    end_marked(mark, grace_s=0.0)


def kill_own() -> None:
    """Kill the processes without which a Ray that this process started ends."""
    for process in own_processes().values():
        with contextlib.suppress(OSError):
            process.kill()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and _alive(process):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def own_processes() -> dict[str, subprocess.Popen[bytes]]:
    """The control process and the node process of a Ray that this process started, by their names; empty for one that it joined."""
    node: Any = ray._private.worker._global_node
    started = {} if node is None else node.all_processes
    return {name: started[name][0].process for name in NAMES if name in started}


class ControlWatch:
    """Says when a process has ended that a run cannot go on without: the cluster's control process, or the node process of the
    driver's own machine. ``now_s`` is the time, in seconds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        node: Any = ray._private.worker._global_node
        self._own = own_processes()
        self._now_s = now_s
        self._gcs, self._host = str(node.gcs_address), str(node.node_ip_address)
        self._raylet = None if self._own else _raylet_of(str(node.raylet_socket_name))
        self._patience_s = float(os.environ.get(f"RAY_{RECONNECT}", AWAY_S))
        self._answered_at = self._looked_at = now_s()

    def lost(self) -> str | None:
        """What has ended, in words; None while all is well. Takes some seconds where a joined cluster's head does not answer."""
        for name, process in self._own.items():
            if (status := process.poll()) is not None:
                return f"Ray's {NAMES[name]} on {self._host} {how_it_ended(status)}"
        if self._raylet is not None and not _alive(self._raylet):
            return f"Ray's {NAMES['raylet']} on {self._host} has ended"
        return None if self._own else self._unreachable()

    def _unreachable(self) -> str | None:
        """A head with fault tolerance may come back: what the environment says of Ray's own patience holds here too."""
        now_s = self._now_s()
        if now_s - self._looked_at < LOOK_S:
            return None
        if reachable(self._gcs):
            self._answered_at = now_s
        self._looked_at = self._now_s()
        if self._looked_at - self._answered_at < self._patience_s:
            return None
        return f"Ray's {NAMES['gcs_server']} at {self._gcs} has not answered for {self._patience_s:.0f} s"


def reachable(address: str) -> bool:
    """Whether anything listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError:
        return False
    return True


def how_it_ended(status: int) -> str:
    """The exit status of a process in words: negative where a signal ended it."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was ended by signal {-status}{name}"


def _alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _raylet_of(socket_name: str) -> psutil.Process | None:
    """The process behind a node's socket on this machine, if it can be seen."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and any(word.endswith(socket_name) for word in process.cmdline()):
                return process
    return None
