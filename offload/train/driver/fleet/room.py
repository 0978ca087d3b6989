"""Find where workers and cores fit, their price, and the nodes that the cluster would have to add. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from offload.adapt.cores import CorePrice, core_speeds
from offload.adapt.situation import Option
from offload.errors import ConfigError
from offload.model.placement import (
    GPU_TYPE,
    Bundle,
    NodeResources,
    Placement,
    WorkerResources,
    bundle_of,
    on_fewest_nodes,
    place_workers,
    placed_as,
)
from offload.train.driver.fleet.known_nodes import KnownNodes, Selection


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The user's terms, fixed for a run.

    Args:
        worker: the resources that each worker reserves.
        bounds: the least and the most workers.
        first: the bounds of the first worker group, which a schedule may limit.
        allowed: whether a worker count is allowed at all.
        chosen: whether decisions choose the count; otherwise it only follows the cluster.
        grows: whether the run asks the cluster for worker nodes.
        cores: the least and the most cores that preprocess, if the run asks the cluster for them; None: all cores.
        mixed_gpus: whether workers may train on several kinds of GPU at once.
        gpu_type: the kind of GPU to train on; None: the kind that holds the most workers.
        usd_per_hour: known prices of instance types.
        nodes_deadline_s: how long the run waits for nodes before it starts.
    """

    worker: WorkerResources
    bounds: tuple[int, int]
    first: tuple[int, int]
    allowed: Callable[[int], bool] = lambda workers: True
    chosen: bool = True
    grows: bool = False
    cores: tuple[int, int] | None = None
    mixed_gpus: bool = False
    gpu_type: str | None = None
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    nodes_deadline_s: float = 900.0

    @property
    def selection(self) -> Selection:
        """The criteria for usable nodes on these terms."""
        return Selection(worker=self.worker, most=self.bounds[1], mixed=self.mixed_gpus, gpu_type=self.gpu_type)

    @property
    def least_allowed(self) -> int | None:
        """The least count of the first worker group; None if no count is allowed."""
        return next((count for count in range(self.first[0], self.first[1] + 1) if self.allowed(count)), None)


@dataclass(frozen=True, kw_only=True)
class Room:
    """The nodes that a run may use, and the distribution of its cores over them.

    Args:
        terms: the user's terms.
        bounds: the least and the most workers.
        nodes: the usable nodes of the cluster.
        core_cpus: ``num_cpus`` of a preprocessing core.
        used: the number of cores that preprocess, by node id.
        speeds: the relative speed of each node's cores, by node id.
        usd_per_core: dollars per hour of a core on a node that only preprocesses; None: unknown.
        grows: whether the cluster would add worker nodes now.
        elastic: whether the cluster would add cores.
        lent: the cores of each node, by its id, that the arbiter lets the run use; None without an arbiter.
    """

    terms: Terms
    bounds: tuple[int, int]
    nodes: KnownNodes
    core_cpus: float
    used: Counter[str]
    speeds: Mapping[str, float]
    usd_per_core: float | None
    grows: bool
    elastic: bool
    lent: Mapping[str, int] | None = None

    def may_be(self, workers: int) -> bool:
        """Return whether the user allows this many workers."""
        return self.bounds[0] <= workers <= self.bounds[1] and self.terms.allowed(workers)

    def placed(self, workers: int) -> Placement | None:
        """The placement of this many workers on these nodes; None if they do not fit."""
        return placed(self.nodes.usable, self.terms.worker, workers)

    def placed_as(self, held: Sequence[int]) -> Placement | None:
        """The placement of ``held`` workers on each usable node; None if they do not fit there, or the nodes are others."""
        if len(held) != len(self.nodes.usable):
            return None
        return placed_as(self.nodes.usable, self.terms.worker, held)

    def most(self, workers: int) -> Placement | None:
        """The placement of as many workers as fit, up to this number; None if not even the least number fits."""
        try:
            within = self.bounds[0], min(self.bounds[1], workers)
            return place_most(self.nodes.usable, self.terms.worker, within, self.terms.allowed)
        except ConfigError:
            return None

    def enough(self, nodes: Sequence[NodeResources]) -> bool:
        """Return whether training could go on with these nodes alone."""
        try:
            start_on(nodes, self.terms, self.bounds)
        except ConfigError:
            return False
        return True

    def node_ids(self, cores_by_node: Sequence[int]) -> tuple[str, ...]:
        """The nodes' ids, each repeated once per core."""
        counts = zip(self.nodes.usable, cores_by_node, strict=True)
        return tuple(node.node_id for node, count in counts for _ in range(count))

    def stores(self) -> dict[str, float]:
        """The sizes of the object stores in bytes, by node id."""
        return {node.node_id: node.store_bytes for node in self.nodes.usable}

    def cores_by_node(self, placement: Placement, cores_goal: int | None, workers_goal: int) -> tuple[int, ...]:
        """The number of cores of each node that preprocess beside these workers, for the wanted numbers of cores and workers."""
        nodes = self.nodes.usable
        if self.lent is not None:
            return self._lent_cores(placement)
        # A worker node without workers, on a cluster that can take it away.
        spare = [
            self.terms.grows and self.terms.worker.trains_on(node) and not workers
            for node, workers in zip(nodes, placement.held, strict=True)
        ]
        if cores_goal is not None:
            return on_fewest_nodes(placement, cores_goal, [self.used[node.node_id] for node in nodes], spare)
        if workers_goal > placement.workers:
            return placement.cores_by_node
        # An idle worker node is released, so that the cluster can remove it.
        return tuple(0 if idle else cores for cores, idle in zip(placement.cores_by_node, spare, strict=True))

    def _lent_cores(self, placement: Placement) -> tuple[int, ...]:
        lent = self.lent or {}
        by_node = zip(self.nodes.usable, placement.cores_by_node, strict=True)
        return tuple(min(cores, lent.get(node.node_id, 0)) for node, cores in by_node)

    # -- options ---------------------------------------------------------------------------------------------------

    def options(self, placement: Placement, *, stranded: bool, pinned: int | None = None) -> list[Option]:
        """The worker counts that fit, and those that would fit on requested nodes. If decisions do not choose the count, or somebody has
        ``pinned`` it, only the present one. A pinned count that is lost is an option, too."""
        least, most = self.bounds if self.terms.chosen else (placement.workers, placement.workers)
        if pinned is not None:
            least, most = min(placement.workers, pinned), max(placement.workers, pinned)
        options: list[Option] = []
        new = 0
        for count in filter(self.terms.allowed, range(least, most + 1)):
            nodes = self._nodes_for(count, new, placement, stranded=stranded)
            there = None if nodes is None else placed(nodes, self.terms.worker, count)
            # More workers need no less room, so no larger count fits either.
            if nodes is None or there is None:
                break
            # More workers need at least as many new nodes: the search goes on from here.
            new = len(nodes) - len(self.nodes.usable)
            options.append(self._option(nodes, there))
        return options

    def _nodes_for(
        self, workers: int, least_new: int, placement: Placement, *, stranded: bool
    ) -> tuple[NodeResources, ...] | None:
        """Nodes with room for this many workers: the present nodes, or these and at least ``least_new`` more of the same kind."""
        nodes = self.nodes.usable
        if stranded or self.placed(workers) is not None or not self.grows:
            return nodes
        like = [node for node, workers_there in zip(nodes, placement.held, strict=True) if workers_there]
        if not like:
            return None
        # The assumption: new nodes are like the largest present one with workers.
        new = max(like, key=lambda node: (node.gpus, node.cpus))
        for count in range(max(least_new, 1), workers + 1):
            more = (*nodes, *[dataclasses.replace(new, node_id=f"new {i}") for i in range(count)])
            if placed(more, self.terms.worker, workers) is not None:
                return more
        return None

    def _option(self, nodes: Sequence[NodeResources], placement: Placement) -> Option:
        """These workers, with the cores that preprocess beside them, in cores of the present mean speed, and the price of both."""
        limits = self.terms.cores
        if self.elastic and limits is not None:
            # The decision chooses the cores together with the workers and the batch, so the option holds the most cores.
            nodes_usd, free = self._worker_nodes_cost(nodes, placement)
            known = nodes_usd is not None and self.usd_per_core is not None
            return Option(
                workers=placement.workers,
                nodes=placement.nodes,
                cores=float(limits[1]),
                usd_per_hour=nodes_usd if known else None,
                elastic=True,
                usd_per_core=self.usd_per_core or 0.0,
                free_cores=float(min(free, limits[1])),
            )
        used_cores = [self.used[node.node_id] for node in nodes]
        if self.lent is not None:  # present nodes alone: an arbiter shares the cluster as it is
            by_node = self._lent_cores(placement)
        elif limits is None:
            by_node = placement.cores_by_node
        else:
            by_node = on_fewest_nodes(placement, limits[1], used_cores)
        speeds = core_speeds(nodes, self.speeds, used_cores)
        cores = sum(speed * cores for speed, cores in zip(speeds, by_node, strict=True))
        usd = usd_per_hour(nodes, self.terms.worker, placement, self.terms.usd_per_hour)
        return Option(workers=placement.workers, nodes=placement.nodes, cores=cores, usd_per_hour=usd)

    def _worker_nodes_cost(self, nodes: Sequence[NodeResources], placement: Placement) -> tuple[float | None, int]:
        """Dollars per hour of the workers' nodes (None: a price is unknown), and the cores that preprocess there."""
        by_node = zip(nodes, placement.cores_by_node, placement.held, strict=True)
        nodes_with_workers = [
            (self.terms.usd_per_hour.get(node.instance_type or ""), free) for node, free, workers in by_node if workers
        ]
        known = [price for price, _ in nodes_with_workers if price is not None]
        return sum(known) if len(known) == len(nodes_with_workers) else None, sum(
            free for _, free in nodes_with_workers
        )

    def core_price(self, placement: Placement) -> CorePrice | None:
        """The price of cores beside these workers; None if a price is unknown."""
        usd, free = self._worker_nodes_cost(self.nodes.usable, placement)
        if usd is None or self.usd_per_core is None:
            return None
        return CorePrice(core=self.usd_per_core, rest=usd, free=free)

    # -- missing nodes ---------------------------------------------------------------------------------------------

    def missing(self, placement: Placement | None, cores_goal: int | None, workers_goal: int) -> dict[Bundle, int]:
        """The bundles that this many cores and workers need beyond the present nodes, with these workers placed."""
        cores = 0 if placement is None else placement.cores
        workers = 0
        if self.terms.grows:
            wanted = max(workers_goal, self.bounds[0])
            workers = wanted - next((n for n in range(wanted, 0, -1) if self.placed(n) is not None), 0)
        needed = {
            _worker_bundle(self.terms.worker, self.nodes.needed_gpu_type): workers,
            bundle_of({"CPU": self.core_cpus}): max((cores_goal or 0) - cores, 0),
        }
        return {bundle: count for bundle, count in needed.items() if count}


def start_on(nodes: Sequence[NodeResources], terms: Terms, bounds: tuple[int, int]) -> Placement:
    """The placement of the most workers within ``bounds`` on these nodes.

    Raises ConfigError if they do not fit, or the requested kind of GPU is missing.
    """
    kinds = sorted({node.gpu_type or "unknown" for node in nodes if node.gpus})
    if terms.gpu_type is not None and terms.gpu_type not in kinds:
        raise ConfigError(
            f"scaling_config asks for accelerator_type={terms.gpu_type!r}, and the cluster's GPUs are "
            f"{', '.join(kinds) or 'none'}: pass one of these, or add nodes with that one."
        )
    usable = KnownNodes.at_start(nodes, terms.selection, 0.0)[0].usable
    return place_most(usable, terms.worker, bounds, terms.allowed)


def missing_at_start(nodes: Sequence[NodeResources], terms: Terms) -> dict[Bundle, int]:
    """The bundles that the least number of workers, and of cores beside them, need beyond these nodes."""
    workers = terms.least_allowed or 1
    fitting = [(0, 0)]  # worker counts that fit now, with the cores left beside them
    for count in range(1, workers + 1):
        try:
            fitting.append((count, start_on(nodes, terms, (count, count)).cores))
        except ConfigError:
            continue
    count, cores = fitting[-1]
    least_cores = (terms.cores or (1, 1))[0]
    needed = {
        _worker_bundle(terms.worker, terms.gpu_type): workers - count,
        bundle_of({"CPU": 1.0}): max(least_cores - cores, 0),
    }
    return {bundle: number for bundle, number in needed.items() if number}


def _worker_bundle(worker: WorkerResources, gpu_type: str | None) -> Bundle:
    # A tiny share of the resource that nodes with this kind of GPU have: it selects them and uses nothing up.
    kind = {} if gpu_type is None else {f"{GPU_TYPE}{gpu_type}": 0.001}
    return bundle_of({"CPU": worker.cpus, "GPU": worker.gpus, **worker.others, **kind})


def placed(nodes: Sequence[NodeResources], worker: WorkerResources, workers: int) -> Placement | None:
    """The placement of this many workers on these nodes; None if they do not fit."""
    try:
        return place_workers(nodes, worker, (workers, workers))
    except ConfigError:
        return None


def task_cpus(nodes: Sequence[NodeResources], worker: WorkerResources, bounds: tuple[int, int]) -> float:
    """``num_cpus`` of a preprocessing core that fits beside any number of workers within ``bounds``."""
    placements = [placed(nodes, worker, count) for count in range(bounds[0], bounds[1] + 1)]
    # The least: Ray fixes an actor's CPUs when it starts, and the number of workers changes later.
    return min(placement.task_cpus for placement in placements if placement is not None)


def place_most(
    nodes: Sequence[NodeResources], worker: WorkerResources, bounds: tuple[int, int], allowed: Callable[[int], bool]
) -> Placement:
    """The placement of the largest allowed worker count within ``bounds`` that fits.

    Raises ConfigError if no count fits, or none is allowed.
    """
    counts = [count for count in range(bounds[0], bounds[1] + 1) if allowed(count)]
    if not counts:
        raise ConfigError(
            f"no number of workers from {bounds[0]} to {bounds[1]} divides the batch, as deterministic=True needs: choose a "
            "batch size that is a multiple of the number of workers."
        )
    for count in reversed(counts):
        placement = placed(nodes, worker, count)
        if placement is not None:
            return placement
    return place_workers(nodes, worker, (counts[0], counts[0]))


def usd_per_hour(
    nodes: Sequence[NodeResources], worker: WorkerResources, placement: Placement, prices: Mapping[str, float]
) -> float | None:
    """Dollars per hour of the nodes that a placement needs: all except idle worker nodes. None if the price of one is unknown."""
    by_node = zip(nodes, placement.held, strict=True)
    needed = [node for node, workers_there in by_node if workers_there or not worker.trains_on(node)]
    known = [prices.get(node.instance_type or "") for node in needed]
    return None if None in known else sum(price for price in known if price is not None)


def usd_per_core(nodes: KnownNodes, terms: Terms) -> float | None:
    """The mean price, in dollars per hour, of a core on the nodes that only preprocess; None if no price is known."""
    only = [node for node in nodes.usable if not terms.worker.trains_on(node) and node.cpus >= 1]
    priced = [(terms.usd_per_hour.get(n.instance_type or ""), min(n.cpus, n.process_room)) for n in only]
    prices = [price / cpus for price, cpus in priced if price is not None]
    return sum(prices) / len(prices) if prices else None
