"""Where the pool's processes run: the nodes of a Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from offload.pipeline.pool.preprocessor import Preprocessor
from offload.pipeline.preprocessing.environment import Ordinal

_OF_FEED = re.compile(r" (hub|feed \w+)$")  # the end of the name of an actor that feeds a run


class Processes(Protocol):
    """Starts and ends the processes of cores.

    Args:
        reserves: whether each process reserves CPUs, for which others would otherwise compete.
        title: what the processes are called.
    """

    reserves: bool
    title: str

    def start(self, node: str, hub: Any, me: Ordinal) -> Any:
        """Start a :class:`Preprocessor` on a node; return its handle at once. ``hub``: to whom it reports; ``me``: its number."""

    def end(self, handle: Any) -> None:
        """End a process at once."""


class RayProcesses:
    """Actors of Ray. ``task_cpus``: the CPUs that each reserves; ``runtime_env``: its runtime environment; ``reports``: whether it
    reports to this process's own actor."""

    def __init__(self, task_cpus: float, runtime_env: Mapping[str, Any], *, reports: bool) -> None:
        import ray

        self._ray = ray
        self.actor: Any = ray.remote(Preprocessor)
        self._cpus, self._runtime_env = task_cpus, dict(runtime_env) or None
        feed = ray.get_runtime_context().get_actor_name() if reports else None
        self.title = f"{_OF_FEED.sub('', feed)} preprocessing" if feed else "preprocessing"

    @property
    def reserves(self) -> bool:
        """See :class:`Processes`."""
        return bool(self._cpus)

    @reserves.setter
    def reserves(self, reserves: bool) -> None:
        assert not reserves
        self._cpus = 0.0

    def start(self, node: str, hub: Any, me: Ordinal) -> Any:
        """See :class:`Processes`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Hard: were the node gone, a soft one would put this process on another node, above the cores that are
        # planned there.
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": self._cpus, "runtime_env": self._runtime_env, "scheduling_strategy": where}
        return self.actor.options(**options).remote(hub, me, self.title, node)

    def end(self, handle: Any) -> None:
        """See :class:`Processes`."""
        self._ray.kill(handle)
