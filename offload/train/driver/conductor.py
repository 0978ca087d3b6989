"""Carry out the actions of the state machine (:mod:`offload.train.driver.fleet`), and feed it events."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, assert_never

from offload.formatting import parts_held
from offload.model.placement import NodeResources
from offload.pipeline.blocks.receiver import Pending
from offload.report.events import EventIgnored, NotStarted, RunEvent
from offload.train.cluster.connected import ConnectedCluster
from offload.train.driver.fleet.messages import (
    Action,
    Ask,
    ClusterSeen,
    Event,
    Ignored,
    LeaseSeen,
    NewsRead,
    Publish,
    Reshape,
    RoomMade,
    Show,
    TellNotStarted,
)
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Fleet, Starting
from offload.train.driver.fleet.state_machine import step
from offload.train.driver.leasing import Leasing, held_by_others
from offload.train.driver.platform.platform import HeldRequests, Platform, Requests
from offload.train.messages import News, Orders

LOOK_S = 1.0


def wait_for_start(
    terms: Terms,
    platform: Platform,
    *,
    status: Callable[[str], None],
    heed: Callable[[], bool] = lambda: False,
    leasing: Leasing | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> tuple[ConnectedCluster, Fleet, tuple[Action, ...]]:
    """Wait until the run can start: for nodes that the autoscaler adds, or for room that other programs hold.

    Returns the cluster at that time, the run's first state, and its first actions. ``status`` shows what the run waits for. ``heed`` obeys
    what others have asked of the run, and returns whether it must not start yet. ``leasing``: with an arbiter, which
    says when it may start, and with what. ``pause`` waits for so many seconds, or until there is another lease.

    Raises ConfigError if the cluster does not suffice in time, or never can.
    """
    shown, cluster, requests = "", platform.cluster, platform.requests()
    state: Starting | Fleet = Starting(terms=terms)
    try:
        while True:
            if heed():
                requests.ask({})
                if leasing is not None:
                    leasing.depart()
                cluster = _beside(platform, requests, cluster)
                continue
            if leasing is not None:
                lease = leasing.wait()
                if lease is None:
                    status("waiting for the arbiter")
                    pause(LOOK_S)
                    continue
                whole = platform.nodes()
                held = held_by_others(lease, whole, terms.worker, {})
                cluster = dataclasses.replace(cluster, whole=whole, held=held)
                state, _ = step(state, LeaseSeen(lease=lease))
            if leasing is None:
                seen = _cluster_seen(platform, cluster)
            else:
                seen = ClusterSeen(now_s=time.monotonic(), nodes=cluster.nodes)
            state, actions = step(state, seen)
            if isinstance(state, Fleet):
                return cluster, state, actions
            for action in actions:
                if isinstance(action, Ask):
                    requests.ask(action.missing, hold=action.hold)
                if isinstance(action, Show) and action.text != shown:  # without a terminal each call prints a line
                    shown = action.text
                    status(shown)
            if leasing is None:
                cluster = _beside(platform, requests, cluster)
            else:
                pause(LOOK_S)
    finally:
        requests.close()


def _cluster_seen(platform: Platform, cluster: ConnectedCluster) -> ClusterSeen:
    """The cluster as the state machine sees it before the run starts, including who holds its CPUs."""
    shown, by = parts_held(cluster.held_of_all()), platform.holders() if cluster.held else ""
    return ClusterSeen(
        now_s=time.monotonic(),
        nodes=cluster.nodes,
        whole=cluster.whole,
        held=f"{shown} ({by})" if by else shown,
        by_us=bool(cluster.held)
        and platform.held_by_us()
        and all(amounts.keys() <= {"CPU"} for amounts in cluster.held.values()),
    )


def _beside(platform: Platform, requests: HeldRequests, cluster: ConnectedCluster) -> ConnectedCluster:
    """The cluster a moment later, with the resources that programs other than ``requests`` hold."""
    while True:
        # What the requests hold is read before and after: both lists must describe the same moment.
        ours = requests.held()
        time.sleep(LOOK_S)  # Ray reports free resources later than held ones
        cluster = dataclasses.replace(cluster, whole=platform.nodes(), held=platform.held_by_others(ours))
        # Otherwise, room granted meanwhile would count as held by others, and the run would ask for it again.
        if requests.held() == ours:
            return cluster


class HubPort(Protocol):
    """The part of the hub's client that the conductor needs."""

    def publish(self, orders: Orders) -> None:
        """See :class:`offload.train.hub.client.HubClient`."""

    def reshape(
        self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int
    ) -> Pending[bool]:
        """See :class:`offload.train.hub.client.HubClient`."""


class Conductor:
    """The holder of a run's state. Several threads may call its methods.

    Args:
        fleet: the first state.
        first: the first actions.
        hub: the hub of the run.
        obey: hears the orders, too: the supervisor of the workers.
        requests: the requests to the cluster for nodes.
        tell: writes an event.
        free: returns the free amount of each resource, by node id.
        held: returns who holds CPUs, in words.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        first: Sequence[Action],
        *,
        hub: HubPort,
        obey: Callable[[Orders], None] = lambda orders: None,
        requests: Requests,
        tell: Callable[[RunEvent], None],
        free: Callable[[], Mapping[str, Mapping[str, float]]],
        held: Callable[[], str] = str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self._hub, self._obey, self._requests, self._tell, self._now = hub, obey, requests, tell, now
        self._free, self._held = free, held
        # Reentrant: `look` handles several events in one go.
        self._lock = threading.RLock()
        self._making_room: tuple[int, Pending[bool]] | None = None
        self._do(first)

    def read(self, news: News) -> None:
        """Process the hub's news."""
        self.handle(NewsRead(now_s=self._now(), news=news))

    def look(
        self,
        news: News,
        nodes: Sequence[NodeResources],
        leaving: Collection[str] = (),
        silent: Collection[str] = (),
    ) -> None:
        """Process the hub's news and the nodes that are alive. ``leaving``: the ids of nodes that will soon be gone; ``silent``: those of
        nodes that do not answer, which are not among ``nodes``."""
        with self._lock:
            self.read(news)
            self.handle(
                ClusterSeen(now_s=self._now(), nodes=nodes, leaving=frozenset(leaving), silent=tuple(sorted(silent)))
            )
            # Also if the surplus cores did not finish in time: the workers must not wait longer than that for a stuck
            # task.
            if self._making_room is not None and self._making_room[1].done():
                number, self._making_room = self._making_room[0], None
                self.handle(RoomMade(number=number))

    def handle(self, *events: Event | RunEvent) -> None:
        """Process events of the state machine; write those of the run."""
        with self._lock:
            for event in events:
                if isinstance(event, RunEvent):
                    self._do([event])
                    continue
                state, actions = step(self.fleet, event)
                assert isinstance(state, Fleet)
                self.fleet = state
                self._do(actions)

    def close(self) -> None:
        """Withdraw all requests: the run is over."""
        self._requests.close()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Publish():
                    self._hub.publish(action.orders)  # first: workers that start ask the hub
                    self._obey(action.orders)
                case Reshape():
                    self._reshape(action)
                case Ask():
                    self._requests.ask(action.missing, hold=action.hold)
                case RunEvent():
                    self._tell(action)
                case TellNotStarted():
                    self._tell_not_started(action)
                case Ignored():
                    self._tell(EventIgnored(what=type(action.event).__name__, reason=action.reason))
                case Show():
                    pass  # only a run that waits to start has this action
                case _ as never:
                    assert_never(never)

    def _reshape(self, action: Reshape) -> None:
        pending = self._hub.reshape(action.nodes, action.stores, action.timeout_s, action.number)
        # Each reshape replaces the one before it, whose answer nobody waits for any more.
        self._making_room = (action.number, pending) if action.timeout_s else None

    def _tell_not_started(self, action: TellNotStarted) -> None:
        free = self._free()
        self._tell(
            NotStarted(
                workers=action.workers,
                after_s=action.after_s,
                needs=dict(action.needs),
                free={name: sum(node.get(name, 0.0) for node in free.values()) for name in action.needs},
                held=self._held(),
            )
        )
