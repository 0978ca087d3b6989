"""Changes of how ``ray.init`` starts a Ray on this machine. Each is a context, in which a part that a Ray lacks changes nothing."""

from __future__ import annotations

import contextlib
import functools
import mmap
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.ray_private.part import CHANGED, Part
from offload.ray_private.preload import setup_worker

Replacements = list[tuple[Any, str, Any]]
"""Of each: a module or class of Ray, the name of its attribute, and the other value."""

HELPERS = Part(
    name="start without helpers",
    purpose="start a local Ray without its monitor, its log monitor and its dashboard, and its workers without an import of Ray",
    without="ray.init(include_dashboard=False) starts the helpers that it starts for everybody",
    cost="two seconds of CPU time at the start, a quarter of a second for each process, and 1 % of a core",
    needs=(
        "ray._private.parameter:RayParams(no_monitor, include_log_monitor, dashboard_agent_listen_port, setup_worker_path)",
        "ray._private.node:Node.start_api_server",
        "ray._private.runtime_env.context:RuntimeEnvContext(env_vars, py_executable, override_worker_entrypoint, java_jars)",
    ),
)

AGENTS = Part(
    name="small node agents",
    purpose="start a node's agent without the dashboard's parts, or with its metrics on the loopback address alone",
    without="ray.init starts its own agent",
    cost="with ray[default], a second of CPU time at the start and 5 % of a core; the metrics of a local Ray are on all addresses",
    needs=(
        "ray._private.services:_build_python_executable_command_memory_profileable(component)",
        "ray._private.ray_constants:PROCESS_TYPE_DASHBOARD_AGENT",
        "ray._private.utils:get_dashboard_dependency_error()",
    ),
)

PROCESSES = Part(
    name="start of Ray's processes",
    purpose="start Ray's processes out of reach of Ctrl-C and of a terminal's end, tell the server that imports ahead, print no messages "
    "about dead workers, which a run reports itself, and leave SIGTERM to the run",
    without="ray.init starts them, and the handler of SIGTERM is put back afterwards",
    cost="the first worker starts seconds later, Ray prints about dead workers, and the end of a terminal may end Ray before the run",
    needs=(
        "ray._private.utils:set_sigterm_handler(sigterm_handler)",
        "ray._private.worker:listen_error_messages(worker, threads_stopped)",
        "ray._private.services:ConsolePopen",
    ),
)

SETTINGS = Part(
    name="settings of a local Ray",
    purpose="let a local Ray notice the end of its control process soon, start no idle processes ahead, and serve metrics at a port",
    without="ray.init starts a Ray with its own settings",
    cost="Ray starts an idle process for each core, needs a minute to end after its control process, and chooses the port of its metrics",
    needs=("ray:init(_system_config, _metrics_export_port)",),
)


def _unchanged() -> Replacements:
    return []


@contextmanager
def without_helpers() -> Iterator[None]:
    """A context in which ``ray.init`` starts no helper processes.

    One machine needs no autoscaler monitor, a run shows its workers' output without the log monitor, and nobody needs the dashboard.
    They would take two seconds of CPU time at the start, and 1 % of a core. Our own script
    (:mod:`offload.ray_private.preload.setup_worker`) also starts each worker process a quarter of a second sooner.
    """

    def replaced() -> Replacements:
        from ray._private import node, parameter

        alone = functools.partial(
            parameter.RayParams,
            no_monitor=True,
            include_log_monitor=False,  # type: ignore[arg-type]
            dashboard_agent_listen_port=0,
            setup_worker_path=setup_worker.__file__,
        )
        return [(parameter, "RayParams", alone), (node.Node, "start_api_server", lambda node, **named: None)]

    with instead(*HELPERS.use(replaced, otherwise=_unchanged)):
        yield


@contextmanager
def agents_by(script: str, *, without_dashboard: bool = False) -> Iterator[None]:
    """A context in which this script starts the agents of the nodes that this process starts. ``without_dashboard``: whether Ray takes
    it that the dashboard's packages are missing."""

    def replaced() -> Replacements:
        from ray._private import ray_constants, services, utils

        python_of = services._build_python_executable_command_memory_profileable
        missing = ImportError("no dashboard is wanted")

        def with_ours(component: str, *args: Any, **named: Any) -> list[str]:
            agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
            return [*python_of(component, *args, **named), *([script] if agent else [])]

        by_script = [(services, python_of.__name__, with_ours)]
        return [
            *by_script,
            *([(utils, "get_dashboard_dependency_error", lambda: missing)] if without_dashboard else []),
        ]

    with instead(*AGENTS.use(replaced, otherwise=_unchanged)):
        yield


@contextmanager
def undisturbed(start: Callable[..., Any]) -> Iterator[bool]:
    """A context in which ``ray.init`` leaves signals and output to its caller, and starts its processes by ``start``.

    It does not print the raylets' messages about dead workers: a run reports these itself, and Ray's logs have them. Yields whether
    ``start`` will be called.
    """

    def replaced() -> Replacements:
        from ray._private import services, utils, worker

        return [
            (utils, "set_sigterm_handler", lambda handler: None),
            (worker, "listen_error_messages", lambda worker, threads_stopped: None),
            (services, "ConsolePopen", start),
        ]

    replacements = PROCESSES.use(replaced, otherwise=_unchanged)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with instead(*replacements):
            yield bool(replacements)
    finally:
        is_changed = before is not None and signal.getsignal(signal.SIGTERM) is not before
        if is_changed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def settings(wanted: Mapping[str, Any], metrics_port: int | None) -> dict[str, Any]:
    """The arguments of ``ray.init`` for these settings of Ray, without those that this Ray does not know: it would end this process.

    ``metrics_port``: the port at which a node serves its metrics; None: Ray's choice.
    """

    def private() -> dict[str, Any]:
        import ray._raylet

        library = Path(ray._raylet.__file__)
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            known = {name: value for name, value in wanted.items() if text.find(name.encode()) >= 0}
        return {"_system_config": known, "_metrics_export_port": metrics_port}

    with contextlib.suppress(OSError):
        return SETTINGS.use(private, otherwise=dict)
    return {}


@contextmanager
def instead(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """A context in which these attributes of Ray are replaced. One that Ray does not have stays so."""
    originals = []
    try:
        for module, name, value in replacements:
            with contextlib.suppress(*CHANGED):
                originals.append((module, name, getattr(module, name)))
                setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)
