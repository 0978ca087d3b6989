"""Ray's tables of actors, placement groups, waiting requests and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from offload.ray_private.part import Part

PART = Part(
    name="holders of CPUs",
    purpose="say who holds CPUs, and release the placement groups of an ended actor",
    without="placement groups are known by Ray's public table, and all other CPUs count as those of tasks",
    cost="messages about CPUs in use do not name the actors, and groups of an ended actor wait for Ray's own cleanup",
    needs=(
        "ray._private.state:state",
        "ray._raylet:GlobalStateAccessor.get_actor_table",
        "ray._raylet:GlobalStateAccessor.get_placement_group_table",
        "ray.core.generated.gcs_pb2:ActorTableData.FromString",
        "ray.core.generated.gcs_pb2:ActorTableData.ALIVE",
        "ray.core.generated.gcs_pb2:ActorTableData.RESTARTING",
        "ray.core.generated.gcs_pb2:PlacementGroupTableData.FromString",
        "ray.core.generated.gcs_pb2:PlacementGroupTableData.CREATED",
        "ray.core.generated.gcs_pb2:PlacementGroupTableData.REMOVED",
    ),
)

AWAITED = Part(
    name="waiting requests",
    purpose="notice that tasks or actors wait for CPUs that preprocessing holds, and share its cores with them",
    without="nobody counts as waiting",
    cost="preprocessing keeps its cores while other work of the same program waits for them: let it reserve fewer CPUs",
    needs=(
        "ray._private.worker:global_worker",
        "ray._raylet:InnerGcsClient.get_cluster_resource_state",
        "ray.core.generated.autoscaler_pb2:GetClusterResourceStateReply",
        "ray._private.state:jobs()",
    ),
)

ACTOR_IDS = Part(
    name="ids of actors",
    purpose="tell which placement groups an actor of a run has made",
    without="Ray removes the groups of an actor that has ended",
    cost="a group that an actor was just asking for as it was ended may hold CPUs until the program ends",
    needs=("ray.actor:ActorHandle._actor_id",),
)


@dataclass(frozen=True, kw_only=True)
class ActorRow:
    """An actor. Ids are in hexadecimal. ``owner``: the worker that made it; ``group``: its placement group, or empty; ``holds``: whether
    it holds its CPUs now."""

    actor_id: str
    worker: str
    owner: str
    group: str
    name: str
    cpus: float
    holds: bool
    node: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A placement group. Ids are in hexadecimal. ``maker``: the actor that made it; empty if a driver or a task did, None if unknown."""

    group_id: str
    name: str
    maker: str | None
    job: str
    cpus: float
    created: bool
    removed: bool


def actors() -> list[ActorRow]:
    """All actors of the cluster; none where Ray does not tell."""

    def private() -> list[ActorRow]:
        from ray.core.generated import gcs_pb2

        table: Any = gcs_pb2
        kind = table.ActorTableData
        holding = (kind.ALIVE, kind.RESTARTING)
        return [
            ActorRow(
                actor_id=actor.actor_id.hex(),
                worker=actor.address.worker_id.hex(),
                owner=actor.owner_address.worker_id.hex(),
                group=_hex(actor.placement_group_id),
                name=str(actor.repr_name or f"actor {actor.name or actor.class_name.rpartition('.')[2]}"),
                cpus=actor.required_resources.get("CPU", 0.0),
                holds=actor.state in holding,
                node=actor.address.node_id.hex(),
                pid=actor.pid,
            )
            for actor in map(kind.FromString, _accessor().get_actor_table(None, None))
        ]

    return PART.use(private, otherwise=list)


def _hex(group: bytes) -> str:
    """A placement group's id; empty for Ray's id of none, whose bytes are all zero or all one."""
    return group.hex() if set(group) - {0} and set(group) - {255} else ""


def groups() -> list[GroupRow]:
    """All placement groups of the cluster."""

    def private() -> list[GroupRow]:
        from ray.core.generated import gcs_pb2

        table: Any = gcs_pb2
        kind = table.PlacementGroupTableData
        return [
            GroupRow(
                group_id=group.placement_group_id.hex(),
                name=group.name,
                maker=group.creator_actor_id.hex(),
                job=group.creator_job_id.hex(),
                cpus=sum(bundle.unit_resources.get("CPU", 0.0) for bundle in group.bundles),
                created=group.state == kind.CREATED,
                removed=group.state == kind.REMOVED,
            )
            for group in map(kind.FromString, _accessor().get_placement_group_table())
        ]

    return PART.use(private, otherwise=_public_groups)


def _public_groups() -> list[GroupRow]:
    known: Mapping[str, Any] = placement_group_table()
    return [
        GroupRow(
            group_id=group_id,
            name=group["name"],
            maker=None,
            job="",
            cpus=sum(bundle.get("CPU", 0.0) for bundle in group["bundles"].values()),
            created=group["state"] == "CREATED",
            removed=group["state"] == "REMOVED",
        )
        for group_id, group in known.items()
    ]


def _accessor() -> Any:
    from ray._private.state import state

    known: Any = state
    if hasattr(known, "_connect_and_get_accessor"):
        return known._connect_and_get_accessor()
    known._check_connected()  # Ray 2.50
    return known.global_state_accessor


def awaited_cpus() -> float:
    """The CPUs for which tasks and actors of the cluster wait; 0 if none waits, or Ray does not tell."""

    def private() -> float:
        from ray._private.worker import global_worker
        from ray.core.generated import autoscaler_pb2

        worker: Any = global_worker
        kinds: Any = autoscaler_pb2
        reply = kinds.GetClusterResourceStateReply()
        reply.ParseFromString(worker.gcs_client.get_cluster_resource_state())
        asked = reply.cluster_resource_state.pending_resource_requests
        return float(sum(request.request.resources_bundle.get("CPU", 0.0) * request.count for request in asked))

    return AWAITED.use(private, otherwise=lambda: 0.0)


def programs() -> int:
    """The number of programs that are connected to the cluster; 1 where Ray does not tell."""

    def private() -> int:
        from ray._private.state import jobs

        known: Any = jobs()  # type: ignore[no-untyped-call]
        return sum(not job["IsDead"] for job in known)

    return AWAITED.use(private, otherwise=lambda: 1)


def id_of(actor: Any) -> str | None:
    """The id of an actor, by its handle; None if Ray does not tell."""

    def private() -> str:
        return str(actor._actor_id.hex())

    return ACTOR_IDS.use(private, otherwise=lambda: None)


def cpus_in_use() -> float:
    """The CPUs of the cluster that are in use."""
    whole: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return whole.get("CPU", 0.0) - free.get("CPU", 0.0)
