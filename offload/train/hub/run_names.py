"""The names by which a cluster knows its runs: each run's hub has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from offload.train.cluster.holdings import HUB, NAMESPACE, Holdings
from offload.train.hub.client import HubClient

TAKEN = ValueError  # Ray's error for a name that another actor has


def named_hub(run: str, start: Callable[..., Any], holdings: Holdings) -> tuple[str, Any]:
    """Start a run's hub under a name of its own, and note it in ``holdings``. Return the run's name on the cluster, and the actor.

    The name is ``run``, or if another run has it, ``run-2`` and so on. ``start`` takes the options ``name`` and ``namespace``.
    """
    number = 1
    while True:
        name = run if number == 1 else f"{run}-{number}"
        if name not in runs():
            holdings.note_actor(name + HUB)
            try:
                return name, start(name=name + HUB, namespace=NAMESPACE)
            except TAKEN:  # by another driver, in this moment
                holdings.forget_actor(name + HUB)
        number += 1


def runs() -> list[str]:
    """The names of the runs that train on this cluster now."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removesuffix(HUB) for name in names if name.endswith(HUB))


def hub_of(run: str) -> HubClient:
    """The hub of a run. Raises ValueError if it has ended."""
    return HubClient(ray.get_actor(run + HUB, namespace=NAMESPACE))
