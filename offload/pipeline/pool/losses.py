"""The errors by which the pool learns that a process, or its node, is gone."""

from __future__ import annotations

import sys
from typing import TypeGuard

from offload.actors.errors import ProcessLostError


def was_killed(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a process died; of its own accord, or as Ray ended it because the node's memory is nearly full."""
    ray = sys.modules.get("ray")  # only a program that has imported Ray can see its errors
    rays = () if ray is None else (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
    return isinstance(error, (ProcessLostError, *rays))


def node_is_gone(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a process could not start because its node is gone.

    Actors are bound to their node. Once it is gone, Ray cannot place them, which is another error than a death on a living node.
    """
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(error, ray.exceptions.ActorUnschedulableError)


def is_dead(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a process is gone, for either reason."""
    return was_killed(error) or node_is_gone(error)
