"""The free resources of each node."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from offload.ray_private.part import Part

PART = Part(
    name="free resources by node",
    purpose="see what other programs leave free on each node",
    without="the cluster's free resources are divided among its nodes: placement groups by their nodes, tasks and actors evenly",
    cost="on a shared cluster of several nodes, a run may ask for CPUs on the wrong node, and wait until they are free",
    needs=("ray._private.state:available_resources_per_node()",),
)


def free_resources() -> dict[str, dict[str, float]]:
    """The free amount of each resource, by node id. Resources that are fully in use are missing. The data is some tenths of a second
    old."""

    def private() -> dict[str, dict[str, float]]:
        from ray._private.state import available_resources_per_node

        free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        return free

    return PART.use(private, otherwise=_of_the_cluster)


def _of_the_cluster() -> dict[str, dict[str, float]]:
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
    whole = {str(node["NodeID"]): dict(node["Resources"]) for node in nodes if node["Alive"]}
    groups: Any = placement_group_table()
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return divided(whole, _reserved(groups), free)


def _reserved(groups: Any) -> list[tuple[str, dict[str, float]]]:
    """(node id, resources) of each bundle that a placement group holds."""
    created = [group for group in groups.values() if group["state"] == "CREATED"]
    return [
        (str(group["bundles_to_node_id"][number]), dict(bundle))
        for group in created
        for number, bundle in group["bundles"].items()
    ]


def divided(
    whole: dict[str, dict[str, float]], reserved: list[tuple[str, dict[str, float]]], free: dict[str, float]
) -> dict[str, dict[str, float]]:
    """The cluster's ``free`` resources by node: each node's ``whole`` ones without the ``reserved`` ones, scaled to the cluster's sum."""
    left = {node: dict(amounts) for node, amounts in whole.items()}
    for node, bundle in reserved:
        for name, amount in bundle.items():
            if name in left.get(node, {}):
                left[node][name] = max(left[node][name] - amount, 0.0)
    names = {name for amounts in left.values() for name in amounts}
    sums = {name: sum(amounts.get(name, 0.0) for amounts in left.values()) for name in names}
    share = {name: min(free.get(name, 0.0) / total, 1.0) if total else 0.0 for name, total in sums.items()}
    return {
        node: {name: amount * share[name] for name, amount in amounts.items() if amount * share[name]}
        for node, amounts in left.items()
    }
