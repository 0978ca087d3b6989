"""The processes of Ray: start them, watch the indispensable ones, and end those that remain.

Where it stops: it watches a cluster that others started, but never ends it. :mod:`offload.ray_private.local_start` changes how Ray starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray

from offload.errors import RunError
from offload.preload import NONE_AHEAD, ahead
from offload.process import forks
from offload.process.exits import how_it_ended
from offload.process.interrupts import HELD
from offload.ray_private import local_start
from offload.ray_private.first_use import call_before_ray
from offload.ray_private.own_processes import UnknownEndError, own_processes
from offload.ray_private.preload import local_agent, minimal_agent
from offload.train.cluster.reaper import MARK, end_marked

RECONNECT = "gcs_rpc_server_reconnect_timeout_s"  # Ray's setting for how long processes look for a lost control process
AWAY_S = 10.0  # our value; Ray's own minute is for clusters that restart their control process
SYSTEM_CONFIG = {
    RECONNECT: int(AWAY_S),
    **NONE_AHEAD,
}
REACH_S = 2.0
LOOK_S = 1.0
REFUSED_S = 4.0  # patience if connections are refused, which is a surer sign than silence
ENDED = "the connection to Ray has ended."
NAMES = {"gcs_server": "control process (gcs_server)", "raylet": "node process (raylet)"}


def new_mark() -> str:
    """A mark that tells the processes of one Ray from all others."""
    return secrets.token_hex(16)


def start_local(mark: str, *, metrics_port: int | None = None, **options: Any) -> None:
    """Start a Ray on this machine, whose processes carry ``mark``, and connect to it.

    ``metrics_port``: the port at which it serves its metrics on the loopback address, 0 for a free one; None: it serves none.
    """
    os.environ[MARK] = mark
    try:
        with (
            local_start.undisturbed(_out_of_reach) as told,
            local_start.without_helpers(),
            minimal_agents() if metrics_port is None else _local_agents(),
        ):
            if not told:
                ahead.end()  # it would wait for the raylet, and processes for it
            ray.init(address="local", **local_start.settings(SYSTEM_CONFIG, metrics_port), **options)
        if ray.get_runtime_context().get_job_id() != ahead.FIRST_JOB:
            ahead.end()
    finally:
        del os.environ[MARK]


def join(address: str, **options: Any) -> None:
    """Connect to the cluster at ``address``."""
    with local_start.undisturbed(_out_of_reach):
        ray.init(address=address, **options)


def minimal_agents() -> AbstractContextManager[None]:
    """A context in which the nodes that this process starts have agents without the dashboard's parts
    (:mod:`offload.ray_private.preload.minimal_agent`)."""
    return local_start.agents_by(minimal_agent.__file__, without_dashboard=True)


def _local_agents() -> AbstractContextManager[None]:
    """A context in which the nodes that this process starts have agents that listen on the loopback address alone
    (:mod:`offload.ray_private.preload.local_agent`)."""
    return local_start.agents_by(local_agent.__file__)


def _out_of_reach(command: list[str], *, preexec_fn: Callable[[], None] | None = None, **named: Any) -> Any:
    """Start a process that neither Ctrl-C nor the end of a terminal reaches (Ray shields it only from Ctrl-C), in its own session, and
    unblock the signals there that are blocked here."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        if preexec_fn is not None:
            preexec_fn()

    process = subprocess.Popen(command, preexec_fn=prepare, start_new_session=True, **named)
    if Path(command[0]).name == "raylet":
        ahead.tell(process.pid, named.get("env") or os.environ)
    return process


_no_new_ray = threading.local()


@contextmanager
def no_new_ray() -> Iterator[None]:
    """A context in which this thread's calls to Ray raise RunError if there is no connection. Ray itself would start a new Ray. Where
    calls cannot be noticed, only the beginning raises it."""
    if not call_before_ray(_connected_or) and not ray.is_initialized():
        raise RunError(ENDED)
    before = getattr(_no_new_ray, "on", False)
    _no_new_ray.on = True
    try:
        yield
    finally:
        _no_new_ray.on = before


_first_uses: list[Callable[[], None]] = []


def on_first_use(tell: Callable[[], None]) -> bool:
    """Call ``tell`` when the program's own code first uses the present connection. Return whether such calls will be noticed."""
    _first_uses[:] = [tell]
    return call_before_ray(_connected_or)


def _connected_or(start: Callable[[], None]) -> None:
    if getattr(_no_new_ray, "on", False):
        if not ray.is_initialized():
            raise RunError(ENDED)
    elif _first_uses and ray.is_initialized() and not _is_called_here():
        listeners, _first_uses[:] = list(_first_uses), []  # in one step, since other threads may be here too
        for tell in listeners:
            tell()
    start()


def _is_called_here() -> bool:
    """Return whether this package calls Ray, rather than the program's own code or one of Ray's threads on its behalf."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = str(frame.f_globals.get("__name__")).partition(".")[0]
        if caller != "ray":
            return caller == "offload"
        frame = frame.f_back
    return False


@contextmanager
def reaped(mark: str) -> Iterator[None]:
    """A context in which another process waits for the end of this one, to end the processes that it leaves behind."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("reaper.py")), mark]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True) as process:
        assert process.stdin is not None
        forks.closes(process.stdin)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                process.stdin.write(b"all is in order")


def kill_marked(mark: str) -> None:
    """Kill the marked processes at once, Ray's own first, so that they start no others."""
    kill_own()
    end_marked(mark, grace_s=0.0)


def kill_own() -> None:
    """Kill the core processes of the Ray that this process started; its other processes then end."""
    for process in own_processes().values():
        with contextlib.suppress(OSError):
            process.kill()


class ControlWatch:
    """A watch over the processes that a run needs: the cluster's control process, and the node process of the driver's machine.
    ``now_s``: a clock, in seconds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        context = ray.get_runtime_context()
        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
        node: dict[str, Any] = next((each for each in nodes if each["NodeID"] == context.get_node_id()), {})
        self._own = own_processes()
        self._now_s = now_s
        self._gcs, self._host = context.gcs_address, str(node.get("NodeManagerAddress", "this machine"))
        self._raylet = None if self._own else _raylet_of(str(node.get("RayletSocketName", "")))
        setting = os.environ.get(f"RAY_{RECONNECT}")
        self._patience_s = None if setting is None else float(setting)
        self._answered_at = self._looked_at = now_s()
        self._known: str | None = None

    def lost(self) -> str | None:
        """How one of these processes ended, in words; None while all are alive. Takes some seconds if a joined cluster's head does not
        answer."""
        self._known = self._known or self._end()
        return self._known

    def _end(self) -> str | None:
        for name, process in self._own.items():
            try:
                status = process.poll()
            except UnknownEndError:
                return f"Ray's {NAMES[name]} on {self._host} has ended"
            if status is not None:
                return f"Ray's {NAMES[name]} on {self._host} {how_it_ended(status)}"
        if self._raylet is not None and not _alive(self._raylet):
            return f"Ray's {NAMES['raylet']} on {self._host} has ended"
        return None if self._own else self._unreachable()

    def _unreachable(self) -> str | None:
        """A sentence about an unreachable head; None while it answers. A head with fault tolerance may come back, so the timeout that the
        environment sets for Ray applies here too."""
        now_s = self._now_s()
        if now_s - self._looked_at < LOOK_S:
            return None
        error = connecting(self._gcs)
        if error is None:
            self._answered_at = now_s
        self._looked_at = self._now_s()
        patience_s = REFUSED_S if isinstance(error, ConnectionRefusedError) else AWAY_S
        if self._patience_s is not None:
            patience_s = self._patience_s
        if self._looked_at - self._answered_at < patience_s:
            return None
        return f"Ray's {NAMES['gcs_server']} at {self._gcs} has not answered for {patience_s:.0f} s"


def connecting(address: str) -> OSError | None:
    """The error of a connection to ``host:port``; None if it works."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        return error
    return None


def _alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended. A zombie, which its parent has not waited for, has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _raylet_of(socket_name: str) -> psutil.Process | None:
    """The process behind a node's socket on this machine, if it is visible."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                socket_name
                and process.name() == "raylet"
                and any(word.endswith(socket_name) for word in process.cmdline())
            ):
                return process
    return None
