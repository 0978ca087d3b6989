"""The preprocessing speed of each node's cores, from the measured nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.model.placement import NodeResources

Kind = tuple[object, ...]


def core_speeds(nodes: Sequence[NodeResources], measured: Mapping[str, float], used: Sequence[int]) -> list[float]:
    """The speed of each node's cores, relative to the mean of the cores that preprocess now.

    Args:
        nodes: all nodes.
        measured: relative speeds by node id. An unmeasured node is assumed as fast as others of its kind, or as the mean.
        used: how many cores of each node preprocess now.
    """
    of_kind: dict[Kind, list[float]] = {}
    for node in nodes:
        if node.node_id in measured:
            of_kind.setdefault(_kind(node), []).append(measured[node.node_id])
    known = {kind: sum(speeds) / len(speeds) for kind, speeds in of_kind.items()}
    speeds = [measured.get(node.node_id, known.get(_kind(node), 1.0)) for node in nodes]
    count = sum(used)
    mean = sum(speed * cores for speed, cores in zip(speeds, used, strict=True)) / count if count else 1.0
    return [speed / mean for speed in speeds]


def _kind(node: NodeResources) -> Kind:
    return (node.instance_type,) if node.instance_type else (node.cpus, node.gpus, node.gpu_type)
