"""The exceptions of Ray by which the pool learns that a process, or its node, is gone."""

from __future__ import annotations

import ray

# Actors are bound to their node. Once it is gone, Ray cannot place them, which is another error than a death on a
# living node.
NODE_GONE = ray.exceptions.ActorUnschedulableError


KILLED = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""A process died; of its own accord, or as Ray ended it because the node's memory is nearly full."""


DEAD = (*KILLED, NODE_GONE)
