"""The number of workers, and of cores that preprocess: which counts fit the cluster as it is now, a change from one to another,
and what the cluster is asked for.

A change takes four steps, none of which blocks: preprocessing makes room, the workers commit and wait, Ray Train starts the
others, and preprocessing takes what cores are left. Where it stops: whether to change is decided by
:mod:`offload.adapt.decide`; which nodes may be used is known to :mod:`offload.train.nodes`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import ray

from offload.adapt.core_speed import core_speeds
from offload.adapt.decide import Option
from offload.adapt.observe import Size
from offload.errors import ConfigError
from offload.model.placement import NodeResources, Placement, WorkerResources, on_fewest_nodes, place_workers
from offload.train.cluster import GPU_TYPE
from offload.train.context import TRAIN
from offload.train.demand import Bundle, bundle_of
from offload.train.monitor import News, Orders
from offload.train.nodes import Change, Nodes

ROOM_TIMEOUT_S = 60.0  # for the tasks that run on cores which workers are to take
FIRST_RESTART_S = 15.0  # what a change is taken to cost before one was measured
GRANT_S = 900.0  # for nodes that were asked for to join
REFUSED_S = 1800.0  # after nodes did not come, for which no more are counted on

Phase = Literal["", "room", "leave", "commit"]  # to leave is to make room while the workers commit already


def task_cpus(nodes: Sequence[NodeResources], worker: WorkerResources, bounds: tuple[int, int]) -> float:
    """``num_cpus`` of a preprocessing core that fits beside any number of workers within ``bounds``."""
    placements = [_placed(nodes, worker, (count, count)) for count in range(bounds[0], bounds[1] + 1)]
    return min(placement.task_cpus for placement in placements if placement is not None)


def place_most(
    nodes: Sequence[NodeResources], worker: WorkerResources, bounds: tuple[int, int], allowed: Callable[[int], bool]
) -> Placement:
    """The placement of the most workers within ``bounds`` that fit, of the counts that are allowed.

    Raises ConfigError where none of them fits, or none is allowed.
    """
    counts = [count for count in range(bounds[0], bounds[1] + 1) if allowed(count)]
    if not counts:
        raise ConfigError(
            f"no number of workers from {bounds[0]} to {bounds[1]} divides the batch, as deterministic=True needs: choose a "
            "batch size that is a multiple of the number of workers."
        )
    for count in reversed(counts):
        placement = _placed(nodes, worker, (count, count))
        if placement is not None:
            return placement
    return place_workers(nodes, worker, (counts[0], counts[0]))


def _placed(nodes: Sequence[NodeResources], worker: WorkerResources, counts: tuple[int, int]) -> Placement | None:
    try:
        return place_workers(nodes, worker, counts)
    except ConfigError:
        return None


def usd_per_hour(
    nodes: Sequence[NodeResources], worker: WorkerResources, placement: Placement, prices: Mapping[str, float]
) -> float | None:
    """Dollars per hour of the nodes that a placement needs: all but those that are there for workers and hold none. None
    where the price of one is not known."""
    needed = [
        node for node, held in zip(nodes, placement.held, strict=True) if held or not worker.trains_on(node)
    ]  # fmt: skip
    known = [prices.get(node.instance_type or "") for node in needed]
    return None if None in known else sum(price for price in known if price is not None)


class Asked(Protocol):
    """Who is asked for what is missing; see :class:`offload.train.demand.Demand`."""

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None: ...
    def close(self) -> None: ...


class Workers:
    """How many train, and where.

    Args:
        nodes: that may be used.
        worker: what each reserves.
        bounds: least and most.
        placement: at the start.
        hub: the run's actor.
        demand: asks the cluster for nodes.
        tell: writes an event.
        chosen: whether a count is to be chosen; else it only changes with the cluster.
        grows: whether counts that do not fit now may be asked for.
        allowed: whether a count may be used at all.
        usd_per_hour: prices of instance types, as far as they are known.
        core_cpus: what a preprocessing core reserves.
        cores: least and most that are to preprocess, where those are asked for; None: all that there are.
        now: the time, in seconds.
    """

    def __init__(
        self,
        nodes: Nodes,
        worker: WorkerResources,
        bounds: tuple[int, int],
        placement: Placement,
        *,
        hub: Any,
        demand: Asked,
        tell: Callable[..., None],
        chosen: bool,
        grows: bool,
        allowed: Callable[[int], bool],
        usd_per_hour: Mapping[str, float],
        core_cpus: float,
        cores: tuple[int, int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement = placement
        self.restart_s = FIRST_RESTART_S
        self._nodes, self._worker, self._bounds = nodes, worker, bounds
        self._hub, self._demand, self._tell = hub, demand, tell
        self._chosen, self._grows, self._allowed = chosen, grows, allowed
        self._usd_per_hour, self._core_cpus, self._core_bounds, self._now = usd_per_hour, core_cpus, cores, now
        self.cores_wanted: int | None = None
        self._workers_wanted = placement.workers
        self._asked_at: float | None = None
        self._asked_for = 0
        self._running = False
        self._refused_until = -math.inf
        self._used = Counter(self._ids(placement.cores_by_node))  # cores that preprocess, by node
        self._speeds: Mapping[str, float] = {}
        self._worker_nodes: tuple[str, ...] = ()
        self._without: tuple[str, ...] = ()
        self._phase: Phase = ""
        self._next = placement
        self._room: Any = None
        self._orders = Orders()
        self._attempts = 0
        self._stopped_at = 0.0
        self._resized_at: float | None = None
        self._waiting = False
        self._usd_per_core: float | None = None
        self._learn_price()
        self._avoid()

    @property
    def wanted(self) -> int:
        """The count that the next worker group is to have; 0: none fits, and the run waits for nodes."""
        if self._waiting or self._phase == "leave":
            return 0
        return self._next.workers if self._phase == "commit" else self.placement.workers

    @property
    def busy(self) -> bool:
        """Whether a change is under way, or the run waits for nodes."""
        return bool(self._phase) or self._waiting

    @property
    def in_use(self) -> set[str]:
        """Ids of the nodes that work for the run."""
        return {*self._used, *self._worker_nodes}

    @property
    def cores(self) -> int:
        """That preprocess now."""
        return self._used.total()

    def fits(self, workers: int) -> bool:
        """Whether there is room for so many now."""
        return self._placed(workers) is not None

    def options(self) -> list[Option]:
        """The counts that fit, and those that would on nodes that can be asked for; the present one alone where none is to be
        chosen."""
        found = []
        least, most = self._bounds if self._chosen else (self.placement.workers, self.placement.workers)
        new = 0
        for count in filter(self._allowed, range(least, most + 1)):
            nodes = self._room_for(count, new)
            placement = None if nodes is None else _placed(nodes, self._worker, (count, count))
            if nodes is None or placement is None:
                break
            new = len(nodes) - len(self._nodes.usable)
            cores = self._cores_with(nodes, placement)
            usd = self._usd_with(nodes, placement, cores)
            found.append(Option(workers=count, nodes=placement.nodes, cores=cores, usd_per_hour=usd))
        return found

    def want_cores(self, cores: int, **because: float) -> None:
        """So many are to preprocess, ``because`` of these rates: ask the cluster for those that it lacks, and leave nodes that are not
        needed."""
        if cores == self.cores_wanted:
            return
        self._tell("cores_wanted", cores=cores, before=self.cores, **because)
        self.cores_wanted = cores
        if not self.busy:
            self._reshape()

    def want_workers(self, workers: int) -> None:
        """So many are to train, once there is room for them."""
        if workers == self._workers_wanted:
            return
        if workers > self.placement.workers:
            self._tell("workers_wanted", workers=workers, before=self.placement.workers)
        self._workers_wanted = workers

    def close(self) -> None:
        """The run is over: nothing is asked for any more."""
        self._demand.close()

    def change(self, size: Size, orders: Orders, news: News) -> None:
        """Begin to change to another count; ``orders`` are those that hold otherwise."""
        placement = self._placed(size.workers)
        if placement is None:
            return
        batch = size.workers, size.local_batch_size, size.accum_steps
        self._begin("room", placement, dataclasses.replace(orders, resize=True, batch=batch))

    def _leave(self, placement: Placement) -> None:
        """Nodes are given notice: the workers commit at once, whatever still runs on the cores that they are to take."""
        orders = dataclasses.replace(self._orders, resize=True, batch=None)
        self._hub.order.remote(orders, 0)
        self._begin("leave", placement, orders)

    def look(self, news: News, alive: Sequence[NodeResources], leaving: Collection[str] = ()) -> None:
        """Go on with a change, and follow the cluster. ``leaving``: ids of nodes that are alive but will soon be gone."""
        for event in news.events:
            self._take(event)
        self._speeds = news.speeds.get(TRAIN, {})
        self._worker_nodes, self._running = news.worker_nodes, news.running
        change = self._nodes.look(
            alive, leaving=leaving, failing=news.failing, used=self.in_use, process_bytes=news.process_bytes
        )
        self._avoid()
        if change is not None:
            self._follow(change)
        self._ask()
        if not self._phase and not self._waiting and not set(leaving).isdisjoint(news.worker_nodes):
            self._leave(self.placement)
        if self._phase in ("room", "leave") and ray.wait([self._room], timeout=0)[0]:
            self._phase, self._attempts = "commit", news.attempts
            self._hub.order.remote(self._orders, self.wanted)
        elif self._phase == "commit" and news.attempts > self._attempts and news.adapted.workers:
            before, self.placement, self._phase = self.placement.workers, self._next, ""
            self._workers_wanted = self.placement.workers
            self._reshape()
            self._tell("resized", workers_before=before, workers=news.adapted.workers)

    def _begin(self, phase: Phase, placement: Placement, orders: Orders) -> None:
        """Let preprocessing leave the cores that workers are to take, and those of nodes that are to be left."""
        self._next, self._phase, self._orders = placement, phase, orders
        self._used &= Counter(self._ids(self._cores_by_node(placement)))
        self._room = self._hub.reshape.remote(tuple(self._used.elements()), self._stores(), ROOM_TIMEOUT_S)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self._stopped_at = event["at"] - event["seconds"]
        if event["event"] == "ready_to_resize":
            self._resized_at = self._stopped_at
        if event["event"] == "first_step" and self._resized_at is not None:
            self.restart_s = event["at"] - self._resized_at
            self._tell("resize_cost", without_steps_s=round(self.restart_s, 3))
            self._resized_at = None

    def _avoid(self) -> None:
        without = self._nodes.without_workers
        if without != self._without:
            self._without = without
            self._hub.avoid.remote(without)

    def _follow(self, change: Change) -> None:
        """The cluster has other nodes than before."""
        self._learn_price()
        if change.joined:
            self._refused_until, self._asked_at = -math.inf, None
        going_on = self._placed(self._next.workers) if self._phase else None
        placement = going_on or self.most(self._nodes.usable)
        self._tell(
            "cluster_changed",
            **dataclasses.asdict(change),
            workers=placement.workers if placement is not None else 0,
            preprocessing_cores=sum(self._cores_by_node(placement)) if placement is not None else 0,
        )
        self._waiting = placement is None
        if going_on is not None:
            # What was begun still fits: another node is no reason to restart for nothing.
            self._next = going_on
            if self._phase in ("room", "leave"):
                self._begin(self._phase, going_on, self._orders)
            return
        self._phase = ""
        if change.leaving and placement is None:
            # Workers commit within the notice, and wait for other nodes.
            self._hub.order.remote(dataclasses.replace(self._orders, resize=True, batch=None), 0)
        elif change.leaving and placement is not None and placement.workers < self.placement.workers:
            self._leave(placement)
        elif placement is not None:
            self._take_up(placement)

    def _take_up(self, placement: Placement) -> None:
        fewer = placement.workers < self.placement.workers
        self.placement = placement
        self._reshape()
        more = None if self._chosen else self._placed(self._workers_wanted)
        if fewer:
            # They hold cores that preprocessing needs now, and may wait for it already: they cannot commit first.
            self._hub.replace_workers.remote(placement.workers)
        elif more is not None and more.workers > placement.workers:
            # What was lost has come back, and nobody else decides on the number.
            self._begin("room", more, dataclasses.replace(self._orders, resize=True, batch=None))

    def most(self, nodes: Sequence[NodeResources]) -> Placement | None:
        """The placement of as many workers as there are, or as still fit on these nodes."""
        bounds = self._bounds[0], min(self._bounds[1], self.placement.workers)
        try:
            return place_most(nodes, self._worker, bounds, self._allowed)
        except ConfigError:
            return None

    # --- what the cluster is asked for ---

    def _ask(self) -> None:
        """Ask for what is missing, if anything is. While workers are started it is not asked: what is asked for is held, for a moment,
        by whoever asked, and could be the room that they are to have."""
        if self._phase or not (self._running or self._waiting):
            self._demand.ask({})
            return
        missing = self._missing()
        count = sum(missing.values())
        if count > self._asked_for or not missing:
            self._asked_at = None
        self._asked_for = count
        if self._now() < self._refused_until and not self._waiting:
            missing = {}
        elif missing and self._asked_at is None:
            self._asked_at = self._now()
        elif self._asked_at is not None and self._now() - self._asked_at >= GRANT_S:
            self._lose_patience()
        self._demand.ask(missing, hold=self._waiting)

    def _missing(self) -> dict[Bundle, int]:
        cores = 0 if self._waiting else self.placement.cores
        missing_cores = max((self.cores_wanted or 0) - cores, 0)
        missing_workers = 0
        if self._grows:
            wanted = max(self._workers_wanted, self._bounds[0])
            missing_workers = wanted - next((n for n in range(wanted, 0, -1) if self.fits(n)), 0)
        kind = self._nodes.needed_gpu_type
        others = {**self._worker.others, **({f"{GPU_TYPE}{kind}": 0.001} if kind is not None else {})}
        worker = {"CPU": self._worker.cpus, "GPU": self._worker.gpus, **others}
        missing = {bundle_of(worker): missing_workers, bundle_of({"CPU": self._core_cpus}): missing_cores}
        return {bundle: count for bundle, count in missing.items() if count}

    def _lose_patience(self) -> None:
        """What was asked for does not come: go on with what there is. Without any worker there is nothing to go on with."""
        self._asked_at = None
        self._tell(
            "not_granted", workers=self._workers_wanted, cores=self.cores_wanted, cores_now=self.cores, after_s=GRANT_S,
            workers_now=0 if self._waiting else self.placement.workers,
        )  # fmt: skip
        if not self._waiting:
            self._refused_until = self._now() + REFUSED_S

    def _room_for(self, workers: int, least_new: int) -> tuple[NodeResources, ...] | None:
        """The nodes with room for so many: those there are, or with ``least_new`` or more others like them, where such may be
        asked for."""
        nodes = self._nodes.usable
        if self._waiting or self.fits(workers) or not self._grows or self._now() < self._refused_until:
            return nodes
        like = [node for node, held in zip(nodes, self.placement.held, strict=True) if held]
        if not like:
            return None
        new = max(like, key=lambda node: (node.gpus, node.cpus))
        for count in range(max(least_new, 1), workers + 1):
            more = (*nodes, *[dataclasses.replace(new, node_id=f"new {i}") for i in range(count)])
            if _placed(more, self._worker, (workers, workers)) is not None:
                return more
        return None

    # --- where things are ---

    def _cores_with(self, nodes: Sequence[NodeResources], placement: Placement) -> float:
        """The cores that would preprocess beside these workers, in cores as fast as those of now are in the mean."""
        if self._elastic:
            # They come and go with what the workers need, one as much as the other.
            assert self._core_bounds is not None
            each = (self.cores_wanted or 0) / max(self.placement.workers, 1)
            least, most = self._core_bounds
            return float(min(max(math.ceil(each * placement.workers), least), most))
        used = [self._used[node.node_id] for node in nodes]
        by_node = placement.cores_by_node
        if self._core_bounds is not None:
            by_node = on_fewest_nodes(placement, self._core_bounds[1], used)
        speeds = core_speeds(nodes, self._speeds, used)
        return sum(speed * cores for speed, cores in zip(speeds, by_node, strict=True))

    def _usd_with(self, nodes: Sequence[NodeResources], placement: Placement, cores: float) -> float | None:
        """Dollars per hour with these workers and so many cores."""
        if not self._elastic:
            return usd_per_hour(nodes, self._worker, placement, self._usd_per_hour)
        held = [
            (node, free)
            for node, free, held in zip(nodes, placement.cores_by_node, placement.held, strict=True)
            if held
        ]
        prices = [self._usd_per_hour.get(node.instance_type or "") for node, _ in held]
        beside = max(cores - sum(free for _, free in held), 0.0)
        if None in prices or (beside and self._usd_per_core is None):
            return None
        return sum(price for price in prices if price is not None) + beside * (self._usd_per_core or 0.0)

    def _learn_price(self) -> None:
        """What a core costs on the nodes that only preprocess; of those that have left, what it did."""
        only = [n for n in self._nodes.usable if not self._worker.trains_on(n) and n.cpus >= 1]
        known = [(self._usd_per_hour.get(n.instance_type or ""), min(n.cpus, n.process_room)) for n in only]
        each = [price / cpus for price, cpus in known if price is not None]
        if each:
            self._usd_per_core = sum(each) / len(each)

    @property
    def _elastic(self) -> bool:
        """Whether cores are added and given back as the workers need them."""
        return self._core_bounds is not None and self.cores_wanted is not None and self._now() >= self._refused_until

    def _placed(self, workers: int) -> Placement | None:
        return _placed(self._nodes.usable, self._worker, (workers, workers))

    def _cores_by_node(self, placement: Placement) -> tuple[int, ...]:
        """How many cores of each node are to preprocess."""
        nodes = self._nodes.usable
        spare = [
            self._grows and self._worker.trains_on(node) and not held
            for node, held in zip(nodes, placement.held, strict=True)
        ]
        if self.cores_wanted is not None:
            return on_fewest_nodes(placement, self.cores_wanted, [self._used[node.node_id] for node in nodes], spare)
        if self._workers_wanted > placement.workers:
            return placement.cores_by_node
        # A node for workers that has none is left, so that it can be given back.
        return tuple(0 if left else cores for cores, left in zip(placement.cores_by_node, spare, strict=True))

    def _reshape(self) -> None:
        nodes = self._ids(self._cores_by_node(self.placement))
        self._used = Counter(nodes)
        self._hub.reshape.remote(nodes, self._stores(), 0.0)

    def _stores(self) -> dict[str, float]:
        return {node.node_id: node.store_bytes for node in self._nodes.usable}

    def _ids(self, cores: Sequence[int]) -> tuple[str, ...]:
        return tuple(node.node_id for node, count in zip(self._nodes.usable, cores, strict=True) for _ in range(count))
