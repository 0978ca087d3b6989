"""The core processes of the Ray that this process has started."""

from __future__ import annotations

from typing import Any, Protocol

import psutil
import ray

from offload.ray_private.part import Part

PART = Part(
    name="core processes",
    purpose="watch the control process and the node process of a Ray that this process has started, and end them",
    without="they are this process's children with their names",
    cost="if one of them ends, the run does not say with which exit status",
    needs=("ray._private.worker:_global_node", "ray._private.node:Node.all_processes"),
)

NAMES = ("gcs_server", "raylet")


class Process(Protocol):
    """A process that this one has started."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it lives."""

    def kill(self) -> None:
        """Kill it."""


class UnknownEndError(Exception):
    """A process has ended, and nobody knows how."""


class Child:
    """A child of this process, as the operating system knows it. Ray itself waits for its end, and so gets its exit status."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """Return None while it lives. Raises UnknownEndError afterwards."""
        try:
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            pass
        raise UnknownEndError

    def kill(self) -> None:
        """Kill it. Raises ProcessLookupError if it has ended."""
        try:
            self._process.kill()
        except psutil.NoSuchProcess:
            raise ProcessLookupError(self.pid) from None


def own_processes() -> dict[str, Process]:
    """The control process and the node process of a Ray that this process started, by name; empty for a Ray that it joined."""

    def private() -> dict[str, Process]:
        from ray._private.worker import _global_node

        node: Any = _global_node
        started = {} if node is None else node.all_processes
        return {name: started[name][0].process for name in NAMES if name in started}

    return PART.use(private, otherwise=_children)


def _children() -> dict[str, Process]:
    """A Ray that ends takes some time; without a connection, its processes do not count."""
    children = psutil.Process().children() if ray.is_initialized() else []
    found: dict[str, Process] = {}
    for child in children:
        try:
            name = child.name()
        except psutil.NoSuchProcess:
            continue
        if name in NAMES:
            found[name] = Child(child)  # the last one: an earlier Ray of this process may still be ending
    return found
