"""The processes of Ray: start them, watch the indispensable ones, and end those that remain. Only this module touches Ray's private
interface to them.

Where it stops: it watches a cluster that others started, but never ends it.
"""

from __future__ import annotations

import contextlib
import functools
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
import ray._private.auto_init_hook
import ray._private.node
import ray._private.parameter
import ray._private.ray_constants as ray_constants
import ray._private.services
import ray._private.utils
import ray._private.worker

from offload.errors import RunError
from offload.preload import NONE_AHEAD, ahead, local_agent, minimal_agent, setup_worker
from offload.process import forks
from offload.process.interrupts import HELD
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
        with _undisturbed(), _without_helpers(), minimal_agents() if metrics_port is None else _local_agents():
            ray.init(address="local", _system_config=SYSTEM_CONFIG, _metrics_export_port=metrics_port, **options)
        if ray.get_runtime_context().get_job_id() != ahead.FIRST_JOB:
            ahead.end()
    finally:
        del os.environ[MARK]


def join(address: str, **options: Any) -> None:
    """Connect to the cluster at ``address``."""
    with _undisturbed():
        ray.init(address=address, **options)


@contextmanager
def _without_helpers() -> Iterator[None]:
    """A context in which ``ray.init`` starts no helper processes.

    One machine needs no autoscaler monitor, a run shows its workers' output without the log monitor, and nobody needs the dashboard.
    They would take two seconds of CPU time at the start, and 1 % of a core. Our own script
    (:mod:`offload.preload.setup_worker`) also starts each worker process a quarter of a second sooner.
    """
    alone = functools.partial(
        ray._private.parameter.RayParams,
        no_monitor=True,
        include_log_monitor=False,  # type: ignore[arg-type]
        dashboard_agent_listen_port=0,
        setup_worker_path=setup_worker.__file__,
    )
    with _instead(
        (ray._private.parameter, "RayParams", alone),
        (ray._private.node.Node, "start_api_server", lambda node, **named: None),
    ):
        yield


@contextmanager
def minimal_agents() -> Iterator[None]:
    """A context in which the nodes that this process starts have agents without the dashboard's parts
    (:mod:`offload.preload.minimal_agent`)."""
    missing = ImportError("no dashboard is wanted")
    with (
        _agents_by(minimal_agent.__file__),
        _instead((ray._private.utils, "get_dashboard_dependency_error", lambda: missing)),
    ):
        yield


def _local_agents() -> AbstractContextManager[None]:
    """A context in which the nodes that this process starts have agents that listen on the loopback address alone
    (:mod:`offload.preload.local_agent`)."""
    return _agents_by(local_agent.__file__)


def _agents_by(script: str) -> AbstractContextManager[None]:
    """A context in which this script starts the agents of the nodes that this process starts."""
    python_of = ray._private.services._build_python_executable_command_memory_profileable

    def with_ours(component: str, *args: Any, **named: Any) -> list[str]:
        agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        return [*python_of(component, *args, **named), *([script] if agent else [])]

    return _instead((ray._private.services, python_of.__name__, with_ours))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which ``ray.init`` leaves signals and output to the run.

    It leaves SIGTERM to its caller, and starts processes that neither Ctrl-C nor the end of a terminal reaches (Ray shields them only
    from Ctrl-C). It does not print the raylets' messages about dead workers: a run reports these itself, and Ray's logs have them.
    """
    with _instead(
        (ray._private.utils, "set_sigterm_handler", lambda handler: None),
        (ray._private.worker, "listen_error_messages", lambda worker, threads_stopped: None),
        (ray._private.services, "ConsolePopen", _out_of_reach),
    ):
        yield


@contextmanager
def _instead(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """A context in which these attributes of Ray are replaced."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    try:
        for module, name, value in replacements:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _out_of_reach(command: list[str], *, preexec_fn: Callable[[], None], **named: Any) -> Any:
    """Start a process in its own session, and unblock the signals there that are blocked here."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        preexec_fn()

    process = subprocess.Popen(command, preexec_fn=prepare, start_new_session=True, **named)
    if Path(command[0]).name == "raylet":
        ahead.tell(process.pid, named.get("env") or os.environ)
    return process


_no_new_ray = threading.local()


@contextmanager
def no_new_ray() -> Iterator[None]:
    """A context in which this thread's calls to Ray raise RunError if there is no connection. Ray itself would start a new Ray."""
    _hook_in()
    before = getattr(_no_new_ray, "on", False)
    _no_new_ray.on = True
    try:
        yield
    finally:
        _no_new_ray.on = before


_first_uses: list[Callable[[], None]] = []


def on_first_use(tell: Callable[[], None]) -> None:
    """Call ``tell`` when the program's own code first uses the present connection."""
    _hook_in()
    _first_uses[:] = [tell]


def _hook_in() -> None:
    """Wrap Ray's automatic start, which Ray calls before each of its functions, so that this module notices every call."""
    hook: Any = ray._private.auto_init_hook
    if not isinstance(hook.auto_init_ray, functools.partial):
        hook.auto_init_ray = functools.partial(_connected_or, hook.auto_init_ray)


def _connected_or(start: Callable[[], None]) -> None:
    if getattr(_no_new_ray, "on", False):
        if not ray.is_initialized():
            raise RunError("the connection to Ray has ended.")
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


def own_processes() -> dict[str, subprocess.Popen[bytes]]:
    """The control process and the node process of a Ray that this process started, by name; empty for a Ray that it joined."""
    node: Any = ray._private.worker._global_node
    started = {} if node is None else node.all_processes
    return {name: started[name][0].process for name in NAMES if name in started}


class ControlWatch:
    """A watch over the processes that a run needs: the cluster's control process, and the node process of the driver's machine.
    ``now_s``: a clock, in seconds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        node: Any = ray._private.worker._global_node
        self._own = own_processes()
        self._now_s = now_s
        self._gcs, self._host = str(node.gcs_address), str(node.node_ip_address)
        self._raylet = None if self._own else _raylet_of(str(node.raylet_socket_name))
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
            if (status := process.poll()) is not None:
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


def how_it_ended(status: int) -> str:
    """The exit status of a process in words. A negative status is the signal that ended it."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was ended by signal {-status}{name}"


def _alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended. A zombie, which its parent has not waited for, has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _raylet_of(socket_name: str) -> psutil.Process | None:
    """The process behind a node's socket on this machine, if it is visible."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and any(word.endswith(socket_name) for word in process.cmdline()):
                return process
    return None
