"""Who holds the CPUs of a Ray cluster, and who waits for some.

Where it stops: :mod:`offload.ray_private.cluster_tables` reads Ray's tables. They name actors and placement groups. Of tasks they know
only what all of them hold.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from offload.ray_private import cluster_tables
from offload.ray_private.cluster_tables import ActorRow, GroupRow, awaited_cpus, programs

__all__ = [
    "SLACK",
    "Held",
    "Holder",
    "awaited_cpus",
    "cpus_shown",
    "held",
    "held_in_vain",
    "holders",
    "programs",
    "remove_groups_of",
]

SLACK = 1e-3  # CPUs: sums of Ray's amounts differ in the last decimals


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
    in_use = cluster_tables.cpus_in_use()
    here = ray.get_runtime_context().get_worker_id()
    job = ray.get_runtime_context().get_job_id()
    return holders(cluster_tables.actors(), cluster_tables.groups(), in_use=in_use, here=here, job=job)


def holders(actors: Sequence[ActorRow], groups: Sequence[GroupRow], *, in_use: float, here: str, job: str) -> Held:
    """Who holds the ``in_use`` CPUs, from Ray's tables. ``here``: this process's id as a worker of Ray; ``job``: the id of its job."""
    every = {actor.actor_id for actor in actors}
    living = [actor for actor in actors if actor.holds]
    workers = {here}
    ours: set[str] = set()
    # Ours are also the actors that our actors have started, and so on: as many rounds as generations.
    while new := [a for a in living if a.owner in workers and a.actor_id not in ours]:
        ours.update(actor.actor_id for actor in new)
        workers.update(actor.worker for actor in new)
    candidates = []
    for group in groups:
        if group.created:
            inside = {actor.name for actor in living if actor.group == group.group_id}
            what = " and ".join(sorted(inside)) or f"placement group {group.name or group.group_id[:8]}"
            by_driver = group.maker is not None and group.maker not in every
            by_us = group.maker in ours or (by_driver and group.job == job)
            candidates.append(Holder(what=what, cpus=group.cpus, ours=by_us))
    candidates += [
        Holder(what=actor.name, cpus=actor.cpus, ours=actor.actor_id in ours) for actor in living if not actor.group
    ]
    named = tuple(holder for holder in candidates if holder.cpus > SLACK)
    # Ray's tables name no tasks: they hold what is left.
    return Held(holders=named, tasks=max(in_use - sum(holder.cpus for holder in named), 0.0))


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


def remove_groups_of(makers: Collection[str]) -> bool:
    """Remove the placement groups that these actors, by their ids, have made. Return whether they can make no more: their processes, if on
    this machine, have ended."""
    here = ray.get_runtime_context().get_node_id()
    made_by = [actor for actor in cluster_tables.actors() if actor.actor_id in makers]
    over = not any(actor.node == here and _runs(actor.pid) for actor in made_by)
    for group in cluster_tables.groups():
        if not group.removed and group.maker in makers:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.group_id))))
    return over


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
