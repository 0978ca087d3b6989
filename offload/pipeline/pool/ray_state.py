"""Who holds the CPUs of a Ray cluster, and who waits for some, from Ray's private tables.

Where it stops: the tables name actors and placement groups. Of tasks they know only what all of them hold.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray._private import state
from ray._private.worker import global_worker
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.util.placement_group import PlacementGroup, remove_placement_group

SLACK = 1e-3  # CPUs: sums of Ray's amounts differ in the last decimals
_gcs: Any = gcs_pb2  # generated, without types
_autoscaler: Any = autoscaler_pb2
CREATED = _gcs.PlacementGroupTableData.CREATED
REMOVED = _gcs.PlacementGroupTableData.REMOVED
HOLDING = (_gcs.ActorTableData.ALIVE, _gcs.ActorTableData.RESTARTING)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """An actor or a placement group, ``what`` it is in words, and the CPUs that it holds. ``ours``: whether this process made it, or made
    its maker."""

    what: str
    cpus: float
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Held:
    """The CPUs of the cluster that somebody holds. ``tasks``: those of all tasks together."""

    holders: tuple[Holder, ...] = ()
    tasks: float = 0.0

    @property
    def in_words(self) -> str:
        """Who holds what, the most first: ``2 CPUs: actor Counter``; empty if nobody holds any."""
        sums: Counter[str] = Counter()
        for holder in (*self.holders, Holder(what="tasks", cpus=self.tasks)):
            if holder.cpus > SLACK:
                sums[holder.what] += holder.cpus  # type: ignore[assignment]  # a counter adds up fractions as well
        return ", ".join(f"{what} {cpus_shown(cpus)}" for what, cpus in sums.most_common())

    @property
    def by_us_alone(self) -> bool:
        """Whether actors and placement groups of this process hold all of them."""
        return bool(self.holders) and self.tasks < SLACK and all(holder.ours for holder in self.holders)


def cpus_shown(cpus: float) -> str:
    """A number of CPUs in words: ``1 CPU``, ``0.5 CPUs``."""
    return f"{round(cpus, 2):g} CPU{'' if abs(cpus - 1) < SLACK else 's'}"


def held() -> Held:
    """Who holds the CPUs of the cluster to which this process is connected."""
    known: Any = state
    total, free = known.cluster_resources().get("CPU", 0.0), known.available_resources().get("CPU", 0.0)
    here = ray.get_runtime_context().get_worker_id()
    job = ray.get_runtime_context().get_job_id()
    return holders(_actors(), _groups(), in_use=total - free, here=here, job=job)


def holders(actors: Sequence[Any], groups: Sequence[Any], *, in_use: float, here: str, job: str) -> Held:
    """Who holds the ``in_use`` CPUs, from Ray's tables. ``here``: this process's id as a worker of Ray; ``job``: the id of its job."""
    every = {actor.actor_id for actor in actors}
    living = [actor for actor in actors if actor.state in HOLDING]
    workers = {here}
    ours: set[bytes] = set()
    # Ours are also the actors that our actors have started, and so on: as many rounds as generations.
    while new := [a for a in living if a.owner_address.worker_id.hex() in workers and a.actor_id not in ours]:
        ours.update(actor.actor_id for actor in new)
        workers.update(actor.address.worker_id.hex() for actor in new)
    candidates = []
    for group in groups:
        if group.state == CREATED:
            cpus = sum(bundle.unit_resources.get("CPU", 0.0) for bundle in group.bundles)
            inside = {_name(actor) for actor in living if actor.placement_group_id == group.placement_group_id}
            what = " and ".join(sorted(inside)) or f"placement group {group.name or group.placement_group_id.hex()[:8]}"
            of_our_driver = group.creator_actor_id not in every and group.creator_job_id.hex() == job
            by_us = group.creator_actor_id in ours or of_our_driver
            candidates.append(Holder(what=what, cpus=cpus, ours=by_us))
    for actor in living:
        if not any(actor.placement_group_id):
            cpus = actor.required_resources.get("CPU", 0.0)
            candidates.append(Holder(what=_name(actor), cpus=cpus, ours=actor.actor_id in ours))
    named = tuple(holder for holder in candidates if holder.cpus > SLACK)
    # Ray's tables name no tasks: they hold what is left.
    return Held(holders=named, tasks=max(in_use - sum(holder.cpus for holder in named), 0.0))


def _name(actor: Any) -> str:
    """An actor in words: its own representation, or its class."""
    return str(actor.repr_name or f"actor {actor.name or actor.class_name.rpartition('.')[2]}")


def awaited_cpus() -> float:
    """The CPUs for which tasks and actors of the cluster wait; 0 if none waits."""
    worker: Any = global_worker
    reply = _autoscaler.GetClusterResourceStateReply()
    reply.ParseFromString(worker.gcs_client.get_cluster_resource_state())
    asked = reply.cluster_resource_state.pending_resource_requests
    return float(sum(request.request.resources_bundle.get("CPU", 0.0) * request.count for request in asked))


def held_in_vain() -> str:
    """Who holds the CPUs for which somebody waits while no task runs, in words; empty if nobody waits so, or this process has no Ray."""
    try:
        in_use = held() if ray.is_initialized() and awaited_cpus() else Held()
    except (
        ray.exceptions.RayError,
        RuntimeError,
        AttributeError,
    ):  # another thread is about to start Ray, or to end it
        return ""
    return "" if in_use.tasks > SLACK else in_use.in_words


def programs() -> int:
    """The number of programs that are connected to the cluster."""
    known: Any = state
    return sum(not job["IsDead"] for job in known.jobs())


def remove_groups_of(makers: Collection[str]) -> bool:
    """Remove the placement groups that these actors, by their ids, have made. Return whether they can make no more: their processes, if on
    this machine, have ended."""
    here = ray.get_runtime_context().get_node_id()
    made_by = [actor for actor in _actors() if actor.actor_id.hex() in makers]
    over = not any(actor.address.node_id.hex() == here and _runs(actor.pid) for actor in made_by)
    for group in _groups():
        if group.state != REMOVED and group.creator_actor_id.hex() in makers:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
    return over


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _actors() -> list[Any]:
    tables = state.state._connect_and_get_accessor().get_actor_table(None, None)
    return [_gcs.ActorTableData.FromString(table) for table in tables]


def _groups() -> list[Any]:
    tables = state.state._connect_and_get_accessor().get_placement_group_table()
    return [_gcs.PlacementGroupTableData.FromString(table) for table in tables]
