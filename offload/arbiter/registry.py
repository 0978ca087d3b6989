"""The arbiter of a Ray cluster, by the name of its actor: start it, find it, ask it, stop it.

Where it stops: it connects to no cluster; :mod:`offload.arbiter` does.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.arbiter.ray_arbiter import GROUPS, RayArbiter
from offload.arbiter.status import Status
from offload.errors import ConfigError
from offload.model.allocation.values import Rules
from offload.train.cluster.connection import head_node
from offload.train.cluster.holdings import ARBITER, NAMESPACE

START_S = 60.0  # for a process on the head, which imports scipy
LOOK_S = 0.2  # between two tries
ANSWER_S = 30.0  # Ray may be starting it again
TAKEN = ValueError  # Ray's error for a name that another actor has
MISSING = "no arbiter runs on this Ray cluster: start one with offload arbiter start."


def start(rules: Rules) -> None:
    """Start the arbiter of the cluster to which this process is connected.

    Raises ConfigError if one runs already, or if it does not start in time.
    """
    if arbiter() is not None:
        raise ConfigError(_TWICE)
    # Without the head there is no cluster.
    place = NodeAffinitySchedulingStrategy(head_node(), soft=False)
    actor_class: Any = ray.remote(concurrency_groups=GROUPS)(RayArbiter)  # type: ignore[call-overload]
    try:
        actor = actor_class.options(
            num_cpus=0,
            max_restarts=-1,
            lifetime="detached",
            name=ARBITER,
            namespace=NAMESPACE,
            enable_task_events=False,
            scheduling_strategy=place,
        ).remote(rules)
    except TAKEN:
        if arbiter() is None:
            raise
        raise ConfigError(_TWICE) from None  # by another program, in this moment
    try:
        ray.get(actor.ready.remote(), timeout=START_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        ray.kill(actor)
        raise ConfigError(
            f"the arbiter did not start on the head node within {START_S:g} s ({type(error).__name__}): check that the head runs offload "
            "of this version, and has memory left."
        ) from None


_TWICE = (
    "an arbiter runs already on this Ray cluster: offload arbiter status shows it. To change its rules, stop it with offload arbiter stop, "
    "and start it again: runs keep what they hold meanwhile."
)


def arbiter() -> Any | None:
    """The handle of the cluster's arbiter; None if it has none."""
    try:
        return ray.get_actor(ARBITER, namespace=NAMESPACE)
    except ValueError:
        return None


def status() -> Status:
    """What the arbiter says of the cluster. Raises ConfigError if there is none, or if it does not answer in time."""
    answer: Status = _answer("status")
    return answer


def weigh(name: str, weight: float) -> bool:
    """Give a run another weight; return whether there is such a run. Raises ConfigError as :func:`status` does."""
    return bool(_answer("weigh", name, weight))


def _answer(method: str, *arguments: object) -> Any:
    """The arbiter's answer to a call. Raises ConfigError if there is none, or if it does not answer in time."""
    actor = arbiter()
    if actor is None:
        raise ConfigError(MISSING)
    until = time.monotonic() + ANSWER_S
    while True:
        try:
            call = getattr(actor, method).remote(*arguments)
            return ray.get(call, timeout=max(until - time.monotonic(), LOOK_S))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            # Ray starts an arbiter again whose process has ended.
            if isinstance(error, ray.exceptions.ActorUnavailableError) and time.monotonic() < until:
                time.sleep(LOOK_S)
                continue
            raise ConfigError(
                f"the arbiter has not answered within {ANSWER_S:g} s ({type(error).__name__}). If Ray is starting it again, the next try "
                "gets an answer; otherwise stop it with offload arbiter stop, and start it again."
            ) from None


def stop() -> None:
    """Stop the arbiter. The runs keep what they hold. Raises ConfigError if there is none."""
    actor = arbiter()
    if actor is None:
        raise ConfigError(MISSING)
    ray.kill(actor)
