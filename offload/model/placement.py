"""The number of workers that fit on a cluster while preprocessing keeps its cores. Pure: nodes in, a placement out.

Where it stops: this is a count, not a schedule; Ray places the workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.errors import ConfigError, argument

UNKNOWN_GPU = "of unknown kind"
PROCESS_BYTES = 300 << 20  # the least memory of a preprocessing process: Python with torch and torchvision
MEMORY_SHARE = 0.8  # share of a node's memory outside its object store that these processes may take


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """The resources of one node of the cluster.

    Args:
        node_id: the cluster's own name for the node.
        others: custom resources.
        instance_type: the type under which the node is sold, if known.
        gpu_type: the kind of its GPUs, if known.
        spot: whether the provider may reclaim the node.
        store_bytes: the size of its object store.
        memory_bytes: the size of the rest of its memory (0: unknown).
        process_room: the number of preprocessing processes that fit in this memory, if it limits them (:func:`within_memory`).
    """

    name: str
    node_id: str = ""
    cpus: float
    gpus: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)
    instance_type: str | None = None
    gpu_type: str | None = None
    store_bytes: float = 0.0
    spot: bool = False
    memory_bytes: float = 0.0
    process_room: float = math.inf


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """The resources that one worker reserves: CPUs for its own threads (``host_cpus_per_worker``), GPUs, and custom
    resources."""

    cpus: float
    gpus: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)

    def trains_on(self, node: NodeResources) -> bool:
        """Return whether the node exists for such workers: it has the GPUs or custom resources that they reserve."""
        asked = {name: amount for name, amount in self.others.items() if amount > 0}
        has_others = all(node.others.get(name, 0.0) >= amount for name, amount in asked.items())
        return bool(self.gpus or asked) and node.gpus >= self.gpus and has_others


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A number of workers, the workers on each node, and the CPUs that each node then has left for preprocessing."""

    workers: int
    held: tuple[int, ...]
    free_cpus: tuple[float, ...]

    @property
    def nodes(self) -> int:
        """Nodes that hold workers."""
        return sum(1 for held in self.held if held)

    @property
    def cores(self) -> int:
        """Cores that preprocess: one task each, over all nodes."""
        return sum(self.cores_by_node)

    @property
    def cores_by_node(self) -> tuple[int, ...]:
        """The cores that preprocess on each node."""
        return tuple(_cores(free) for free in self.free_cpus)

    @property
    def task_cpus(self) -> float:
        """``num_cpus`` of one preprocessing core: a little under 1 if a worker reserves a token share of its host's only core.

        Raises ValueError if no node has a core free.
        """
        shares = [free / _cores(free) for free in self.free_cpus if _cores(free) > 0]
        if not shares:
            raise ValueError("no node has a core free for preprocessing")
        # Ray counts CPUs in steps of 1e-4: round down, or the last task of a node would not fit.
        return math.floor(min(*shares, 1.0) * 1e4) / 1e4


def on_fewest_nodes(
    placement: Placement, cores: int, before: Sequence[int] = (), spare: Sequence[bool] = ()
) -> tuple[int, ...]:
    """The number of cores of each node that preprocess when ``cores`` cores are enough.

    Nodes with workers come first, since they are needed anyway. Then come nodes that preprocessed ``before`` (an earlier result
    of this function), then the largest. Nodes that are ``spare`` (meant for workers, and holding none) come last.
    """
    free = placement.cores_by_node
    used = [*before, *[0] * (len(free) - len(before))]
    last = [*spare, *[False] * (len(free) - len(spare))]
    # Few nodes, so that the cluster can give the others back.
    order = sorted(range(len(free)), key=lambda i: (last[i], -placement.held[i], -used[i], -free[i]))
    chosen, left = [0] * len(free), cores
    for i in order:
        chosen[i] = min(free[i], left)
        left -= chosen[i]
    return tuple(chosen)


def _cores(free_cpus: float) -> int:
    # A worker on a small host may reserve a token share of its core (0.01 CPU): the rest still counts as a core.
    return int(free_cpus + 0.5)


def beside(node: NodeResources, held: Mapping[str, float]) -> NodeResources:
    """The node without the resources that others have ``held`` on it."""
    left = {name: max(amount - held.get(name, 0.0), 0.0) for name, amount in node.others.items()}
    cpus, gpus = (max(have - held.get(name, 0.0), 0.0) for have, name in ((node.cpus, "CPU"), (node.gpus, "GPU")))
    return replace(node, cpus=cpus, gpus=gpus, others=left)


def one_gpu_type(
    nodes: Sequence[NodeResources], worker: WorkerResources, most: int, before: str | None = None
) -> str | None:
    """The kind of GPU to train on if the nodes have several kinds; None without GPUs.

    The kind used ``before`` stays if it still exists. Otherwise, the kind that holds the most workers, up to ``most``, wins.
    Workers of one group wait for each other at every step, so the slowest kind would set the pace for all.
    """
    kinds = gpu_types(nodes, worker)
    if not kinds:
        return None
    if before in kinds:
        return before
    return max(sorted(kinds), key=lambda kind: _room(nodes_for(nodes, kind), worker, most))


def gpu_types(nodes: Sequence[NodeResources], worker: WorkerResources) -> set[str]:
    """The kinds of GPU that workers could train on."""
    return {_gpu_type(node) for node in nodes if worker.gpus and node.gpus >= worker.gpus}


def nodes_for(nodes: Sequence[NodeResources], gpu_type: str | None) -> tuple[NodeResources, ...]:
    """The nodes as a run on this kind of GPU (None: any kind) sees them: nodes with other GPUs only preprocess."""
    if gpu_type is None:
        return tuple(nodes)
    return tuple(node if _gpu_type(node) == gpu_type or not node.gpus else replace(node, gpus=0.0) for node in nodes)


def within_memory(nodes: Sequence[NodeResources], process_bytes: float = PROCESS_BYTES) -> tuple[NodeResources, ...]:
    """The nodes, each with room for as many preprocessing processes of ``process_bytes`` as its memory holds, at least one."""
    return tuple(replace(node, process_room=_process_room(node, process_bytes)) for node in nodes)


def _process_room(node: NodeResources, process_bytes: float) -> float:
    if not node.memory_bytes:
        return math.inf
    room = max(int(MEMORY_SHARE * node.memory_bytes / max(process_bytes, PROCESS_BYTES)), 1)
    return room if room < _cores(node.cpus) else math.inf


def _gpu_type(node: NodeResources) -> str:
    return node.gpu_type or UNKNOWN_GPU


def _room(nodes: Sequence[NodeResources], worker: WorkerResources, most: int) -> int:
    return next((count for count in range(most, 0, -1) if _fill(nodes, worker, count) is not None), 0)


def place_workers(
    nodes: Sequence[NodeResources],
    worker: WorkerResources,
    workers: tuple[int, int],
    *,
    cpu_floor: int = 1,
) -> Placement:
    """The largest number of workers within ``workers`` = (least, most) that leaves ``cpu_floor`` cores to preprocess.

    Raises ConfigError if even the least number needs more GPUs or CPUs than exist, or leaves no core for preprocessing. Ray would
    silently wait forever.
    """
    least, most = workers
    for count in range(most, least - 1, -1):
        filled = _fill(nodes, worker, count)
        if filled is not None:
            held, free = filled
            placement = Placement(workers=count, held=tuple(held), free_cpus=tuple(free))
            if placement.cores >= cpu_floor:
                return placement
    total_cpus, total_gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
    asked = f"{least} worker{'s' if least != 1 else ''}"
    if worker.gpus * least > total_gpus:
        fitting = int((total_gpus + 1e-9) // worker.gpus)
        fewer = f"ask for fewer workers (workers={fitting})" if fitting else "fewer workers would not fit either"
        raise ConfigError(
            f"{asked} ask{'s' if least == 1 else ''} for {_gpus(worker.gpus * least)} ({worker.gpus:g} each), but the "
            f"cluster has {total_gpus:g} and cannot grow: {fewer}. Or add GPU nodes (a run asks an autoscaler for them with "
            "cluster=offload.Cluster(autoscale_workers=True)), or train on CPUs with "
            f"{argument('gpus_per_worker', 0, python='scaling_config=ray.train.ScalingConfig(use_gpu=False)')}."
        )
    if _fill(nodes, worker, least) is None:
        others = "".join(f", {amount:g} {name}" for name, amount in worker.others.items() if amount)
        raise ConfigError(
            f"{asked} of {worker.cpus:g} CPUs and {_gpus(worker.gpus)}{others} each cannot fit on the cluster's nodes "
            f"({_describe(nodes)}). Ask for fewer workers or for less per worker "
            '(scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": ...})).'
        )
    raise ConfigError(
        f"{asked} of {worker.cpus:g} CPUs each reserve {worker.cpus * least:g} of the cluster's {total_cpus:g} "
        f"CPUs, and preprocessing needs at least {cpu_floor} whole core{'s' if cpu_floor != 1 else ''}: it would wait "
        "forever. Ask for fewer workers, add a CPU node, or reserve less per worker "
        '(scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0})).'
    )


def placed_as(nodes: Sequence[NodeResources], worker: WorkerResources, held: Sequence[int]) -> Placement | None:
    """The placement of ``held`` workers on each of these nodes; None if they do not fit there."""
    left = [
        beside(node, {"CPU": count * worker.cpus, "GPU": count * worker.gpus})
        for node, count in zip(nodes, held, strict=True)
    ]
    for node, count in zip(nodes, held, strict=True):
        amounts = {"CPU": (node.cpus, worker.cpus), "GPU": (node.gpus, worker.gpus)}
        amounts |= {name: (node.others.get(name, 0.0), amount) for name, amount in worker.others.items()}
        if any(count * amount > have + 1e-9 for have, amount in amounts.values()):
            return None
    free = tuple(min(node.cpus, node.process_room) for node in left)
    placement = Placement(workers=sum(held), held=tuple(held), free_cpus=free)
    return placement if placement.cores else None


def _fill(nodes: Sequence[NodeResources], worker: WorkerResources, count: int) -> tuple[list[int], list[float]] | None:
    """Workers and CPUs left for preprocessing on each node with ``count`` workers; None if they do not fit.

    The workers are packed as Ray packs them, on the fullest GPU nodes first.
    """
    free, held = [n.cpus for n in nodes], [0] * len(nodes)
    left = count
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].gpus, -nodes[i].cpus))
    for i in order:
        fits = left
        if worker.gpus > 0:
            # The tolerance: amounts are sums of fractions, and 0.1 + 0.2 must hold 0.3.
            fits = min(fits, int((nodes[i].gpus + 1e-9) // worker.gpus))
        if worker.cpus > 0:
            fits = min(fits, int((free[i] + 1e-9) // worker.cpus))
        for name, amount in worker.others.items():
            if amount > 0:
                fits = min(fits, int((nodes[i].others.get(name, 0.0) + 1e-9) // amount))
        free[i] -= fits * worker.cpus
        held[i] = fits
        left -= fits
    if left:
        return None
    return held, [min(cpus, node.process_room) for cpus, node in zip(free, nodes, strict=True)]


def _describe(nodes: Sequence[NodeResources]) -> str:
    return ", ".join(f"{n.name}: {n.cpus:g} CPUs, {_gpus(n.gpus)}{_others(n)}" for n in nodes) or "no nodes"


def _others(node: NodeResources) -> str:
    return "".join(f", {amount:g} {name}" for name, amount in node.others.items())


def _gpus(count: float) -> str:
    return f"{count:g} GPU{'s' if count != 1 else ''}"


Bundle = tuple[tuple[str, float], ...]
"""Amounts by resource name, in the order of names."""

GPU_TYPE = "accelerator_type:"
"""Ray's prefix for the resource that names the kind of a node's GPUs."""


def bundle_of(resources: Mapping[str, float]) -> Bundle:
    """A bundle of these resources, without zero amounts."""
    return tuple(sorted((name, amount) for name, amount in resources.items() if amount > 0))
