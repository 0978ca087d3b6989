"""The number of workers: which counts fit the cluster as it is now, and a change from one to another.

A change takes four steps, none of which blocks: preprocessing makes room, the workers commit and wait, Ray Train starts the
others, and preprocessing takes what cores are left. Where it stops: whether to change is decided by
:mod:`offload.adapt.decide`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import ray

from offload.adapt.decide import Option
from offload.adapt.observe import Size
from offload.errors import ConfigError
from offload.model.placement import NodeResources, Placement, WorkerResources, on_fewest_nodes, place_workers
from offload.train.cluster import ask_for
from offload.train.monitor import News, Orders

ROOM_TIMEOUT_S = 60.0  # for the tasks that run on cores which workers are to take
FIRST_RESTART_S = 15.0  # what a change is taken to cost before one was measured

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


class Workers:
    """How many train, and where.

    Args:
        nodes: of the cluster, at the start.
        worker: what each reserves.
        bounds: least and most.
        placement: at the start.
        hub: the run's actor.
        tell: writes an event.
        chosen: whether a count is to be chosen; else it only changes with the cluster.
        allowed: whether a count may be used at all.
        usd_per_hour: prices of instance types, as far as they are known.
        core_cpus: what a preprocessing core reserves.
        most_cores: that are to preprocess; None for all.
    """

    def __init__(
        self,
        nodes: Sequence[NodeResources],
        worker: WorkerResources,
        bounds: tuple[int, int],
        placement: Placement,
        *,
        hub: Any,
        tell: Callable[..., None],
        chosen: bool,
        allowed: Callable[[int], bool],
        usd_per_hour: Mapping[str, float],
        core_cpus: float,
        most_cores: int | None = None,
    ) -> None:
        self.placement = placement
        self.restart_s = FIRST_RESTART_S
        self._nodes, self._worker, self._bounds = tuple(nodes), worker, bounds
        self._hub, self._tell, self._chosen, self._allowed = hub, tell, chosen, allowed
        self._usd_per_hour, self._core_cpus, self._most_cores = usd_per_hour, core_cpus, most_cores
        self.cores_wanted: int | None = None
        self._used = Counter(self._nodes_of(placement.cores_by_node))  # cores that preprocess, by node
        self._avoided: tuple[str, ...] = ()
        self._phase: Phase = ""
        self._next = placement
        self._room: Any = None
        self._orders = Orders()
        self._attempts = 0
        self._stopped_at = 0.0
        self._resized_at: float | None = None
        self._waiting = False

    @property
    def wanted(self) -> int:
        """The count that the next worker group is to have; 0: none fits, and the run waits for nodes."""
        if self._waiting or self._phase == "leave":
            return 0
        return self._next.workers if self._phase == "commit" else self.placement.workers

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return bool(self._phase)

    def options(self) -> list[Option]:
        """The counts that fit, or the present one alone where none is to be chosen."""
        found = []
        least, most = self._bounds if self._chosen else (self.placement.workers, self.placement.workers)
        for count in filter(self._allowed, range(least, most + 1)):
            placement = self._placed((count, count))
            if placement is None:
                break
            usd = usd_per_hour(self._nodes, self._worker, placement, self._usd_per_hour)
            cores = placement.cores if self._most_cores is None else min(placement.cores, self._most_cores)
            found.append(Option(workers=count, nodes=placement.nodes, cores=cores, usd_per_hour=usd))
        return found

    @property
    def cores(self) -> int:
        """That preprocess now."""
        return self._used.total()

    def want_cores(self, cores: int) -> None:
        """So many are to preprocess: ask the cluster for them, and leave nodes that are not needed."""
        if cores == self.cores_wanted:
            return
        self._tell("cores_wanted", cores=cores, before=self.cores)
        self.cores_wanted = cores
        self._ask()
        if not self.busy:
            self._reshape()

    def close(self) -> None:
        """The run is over: nothing is asked for any more."""
        if self.cores_wanted is not None:
            with contextlib.suppress(RuntimeError, ray.exceptions.RayError):  # the cluster may be gone
                ask_for([])

    def _ask(self) -> None:
        if self.cores_wanted is None:
            return
        worker = {"CPU": self._worker.cpus, "GPU": self._worker.gpus, **self._worker.others}
        each = {name: amount for name, amount in worker.items() if amount > 0}
        ask_for([*[each] * self.placement.workers, *[{"CPU": self._core_cpus}] * self.cores_wanted])

    def change(self, size: Size, orders: Orders, news: News) -> None:
        """Begin to change to another count; ``orders`` are those that hold otherwise."""
        placement = self._placed((size.workers, size.workers))
        if placement is None:
            return
        batch = size.workers, size.local_batch_size, size.accum_steps
        self._begin("room", placement, dataclasses.replace(orders, resize=True, batch=batch))

    def _leave(self, placement: Placement) -> None:
        """Nodes are given notice: the workers commit at once, whatever still runs on the cores that they are to take."""
        orders = dataclasses.replace(self._orders, resize=True, batch=None)
        self._hub.order.remote(orders, 0)
        self._begin("leave", placement, orders)

    def _begin(self, phase: Phase, placement: Placement, orders: Orders) -> None:
        """Let preprocessing leave the cores that workers are to take, and those of nodes that are to be left."""
        self._next, self._phase, self._orders = placement, phase, orders
        self._used &= Counter(self._nodes_of(self._cores_by_node(placement)))
        self._room = self._hub.reshape.remote(tuple(self._used.elements()), ROOM_TIMEOUT_S)

    def look(self, news: News, alive: Sequence[NodeResources], leaving: Collection[str] = ()) -> None:
        """Go on with a change, and follow the cluster. ``leaving``: ids of nodes that are alive but will soon be gone."""
        for event in news.events:
            self._take(event)
        self._avoid(news.failing, alive)
        staying = tuple(node for node in alive if node.node_id not in leaving and node.node_id not in self._avoided)
        if staying != self._nodes:
            self._follow(staying, still=[node for node in alive if node.node_id in leaving])
        if not self._phase and not self._waiting and not set(leaving).isdisjoint(news.nodes):
            self._leave(self.placement)
        if self._phase in ("room", "leave") and ray.wait([self._room], timeout=0)[0]:
            self._phase, self._attempts = "commit", news.attempts
            self._hub.order.remote(self._orders, self.wanted)
        elif self._phase == "commit" and news.attempts > self._attempts and news.adapted.workers:
            before, self.placement, self._phase = self.placement.workers, self._next, ""
            self._ask()
            self._reshape()
            self._tell("resized", workers_before=before, workers=news.adapted.workers)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self._stopped_at = event["at"] - event["seconds"]
        if event["event"] == "ready_to_resize":
            self._resized_at = self._stopped_at
        if event["event"] == "first_step" and self._resized_at is not None:
            self.restart_s = event["at"] - self._resized_at
            self._tell("resize_cost", without_steps_s=round(self.restart_s, 3))
            self._resized_at = None

    def _avoid(self, failing: Collection[str], alive: Sequence[NodeResources]) -> None:
        """Do without nodes on which workers failed repeatedly, unless nothing would be left."""
        new = {node for node in failing if node not in self._avoided}
        rest = [node for node in alive if node.node_id not in new and node.node_id not in self._avoided]
        if not new or self._most(rest) is None:
            return
        self._avoided += tuple(sorted(new))
        names = [node.name for node in alive if node.node_id in new]
        self._hub.avoid.remote(self._avoided)
        self._tell("node_excluded", nodes=names)

    def _follow(self, alive: tuple[NodeResources, ...], still: Sequence[NodeResources]) -> None:
        """The cluster has other nodes than before. Those in ``still`` are about to leave it, and work meanwhile."""
        gone = {n.node_id: n.name for n in self._nodes}
        come = {n.node_id: n.name for n in alive}
        self._nodes, self._phase = alive, ""
        placement = self._most(alive)
        self._tell(
            "cluster_changed",
            left=[name for id_, name in gone.items() if id_ not in come],
            leaving=[node.name for node in still],
            joined=[name for id_, name in come.items() if id_ not in gone],
            workers=placement.workers if placement is not None else 0,
            preprocessing_cores=sum(self._cores_by_node(placement)) if placement is not None else 0,
        )
        self._waiting = placement is None
        if still and placement is None:
            # Workers commit within the notice, and wait for other nodes.
            self._hub.order.remote(dataclasses.replace(self._orders, resize=True, batch=None), 0)
        elif still and placement is not None and placement.workers < self.placement.workers:
            self._leave(placement)
        elif placement is not None:
            fewer = placement.workers < self.placement.workers
            self.placement = placement
            self._reshape()
            if fewer:
                # They hold cores that preprocessing needs now, and may wait for it already: they cannot commit first.
                self._hub.replace_workers.remote(placement.workers)

    def _most(self, nodes: Sequence[NodeResources]) -> Placement | None:
        """The placement of as many workers as there are, or as still fit on these nodes."""
        bounds = self._bounds[0], min(self._bounds[1], self.placement.workers)
        try:
            return place_most(nodes, self._worker, bounds, self._allowed)
        except ConfigError:
            return None

    def _placed(self, counts: tuple[int, int]) -> Placement | None:
        return _placed(self._nodes, self._worker, counts)

    def _cores_by_node(self, placement: Placement) -> tuple[int, ...]:
        """How many cores of each node are to preprocess."""
        if self.cores_wanted is None:
            return placement.cores_by_node
        return on_fewest_nodes(placement, self.cores_wanted, [self._used[node.node_id] for node in self._nodes])

    def _reshape(self) -> None:
        nodes = self._nodes_of(self._cores_by_node(self.placement))
        self._used = Counter(nodes)
        self._hub.reshape.remote(nodes, 0.0)

    def _nodes_of(self, cores: Sequence[int]) -> tuple[str, ...]:
        return tuple(node.node_id for node, count in zip(self._nodes, cores, strict=True) for _ in range(count))
