"""Clusters, a hub and an autoscaler made up for tests of the state machine: real conductor, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from offload.model.batch_split import BatchSplit
from offload.model.placement import Bundle, NodeResources, WorkerResources, bundle_of
from offload.report.events.event import RunEvent
from offload.train.driver.conductor import Conductor
from offload.train.driver.fleet.messages import ClusterSeen
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Fleet, Starting
from offload.train.driver.fleet.state_machine import step
from offload.train.messages import GroupStatus, News, Orders

E = TypeVar("E", bound=RunEvent)
WORKER = WorkerResources(cpus=1, gpus=1)
ONE_MORE = bundle_of({"CPU": 1.0, "GPU": 1.0})
NOTHING = News(cursor=0, totals={}, epoch=0, step=0, samples=0, metrics={}, events=())


def gpu_node(name: str, kind: str | None = "A10G", gpus: float = 1) -> NodeResources:
    return NodeResources(name=name, node_id=name, cpus=4, gpus=gpus, gpu_type=kind, instance_type=f"ml.{kind}")


def cpu_node(name: str, node_id: str = "", cpus: float = 8) -> NodeResources:
    return NodeResources(name=name, node_id=node_id or name, cpus=cpus, instance_type="ml.c5.2xlarge")


def split_of(workers: int) -> BatchSplit:
    return BatchSplit(workers=workers, local_batch_size=8, accum_steps=0)


def group(workers: int, attempt: int = 1, nodes: Sequence[str] = (), **more: Any) -> News:
    """News of a worker group that trains."""
    status = GroupStatus(workers=workers, split=split_of(workers))
    return replace(NOTHING, attempts=attempt, running=True, group=status, worker_nodes=tuple(nodes), **more)


@dataclass
class Room:
    """The answer to a reshape, which a test gives."""

    made: bool = False

    def done(self) -> bool:
        return self.made

    def result(self) -> bool:
        return True


@dataclass
class Hub:
    """What reached the hub."""

    orders: Orders = field(default_factory=Orders)
    cores: tuple[str, ...] = ()
    room: Room = field(default_factory=Room)
    number: int = 0

    def publish(self, orders: Orders) -> None:
        assert orders.serial > self.orders.serial
        self.orders = orders

    def reshape(self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int) -> Room:
        assert number > self.number, "a later change of the cores has a higher number"
        self.cores, self.room, self.number = nodes, Room(), number
        return self.room


@dataclass
class Autoscaler:
    """What the cluster is asked for."""

    missing: dict[Bundle, int] = field(default_factory=dict)

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        self.missing = dict(missing)

    def close(self) -> None:
        self.missing = {}


class Run:
    """A run on nodes that a test changes. ``told``: the events it wrote."""

    def __init__(self, *nodes: NodeResources, bounds: tuple[int, int] = (1, 2), started: int = 1, **terms: Any) -> None:
        self.now_s = 0.0
        self.told: list[RunEvent] = []
        self.hub, self.autoscaler = Hub(), Autoscaler()
        given = Terms(worker=WORKER, bounds=bounds, first=(bounds[0], started), **{"grows": True, **terms})
        fleet, first = step(Starting(terms=given), ClusterSeen(now_s=0.0, nodes=nodes))
        assert isinstance(fleet, Fleet)
        self.conductor = Conductor(
            fleet,
            first,
            hub=self.hub,
            requests=self.autoscaler,
            tell=self.told.append,
            free=dict,
            now=lambda: self.now_s,
        )

    @property
    def fleet(self) -> Fleet:
        return self.conductor.fleet

    def look(self, news: News, *nodes: NodeResources, leaving: Sequence[str] = ()) -> None:
        self.conductor.look(news, nodes, leaving)

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.told if isinstance(event, kind)]
