"""Notices that a spot node is about to be taken back: on each such node a small process asks for one, and drains its node.

What follows is what follows when anybody drains a node (:mod:`offload.train.driver.resizing`): the run commits and goes on without
it. Imports neither torch nor Ray Train, since the watchers do not need them. Where it stops: of the clouds, AWS alone says it
at an address that we ask; elsewhere whoever hears of it calls ``ray drain-node`` (docs/spot.md).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.train.cluster.draining import drain
from offload.train.cluster.instance_metadata import ENDPOINT, ENDPOINT_VARIABLE, InstanceMetadata, MetadataError

if TYPE_CHECKING:
    from offload.model.placement import NodeResources

POLL_S = 2.0
UNANSWERED = 3  # questions in a row, after which the run reports it
RESTARTS = 3  # of a watcher whose process dies. Ray's own would be told of on the user's terminal at the end of the run


class Listener(Protocol):
    """Who hears of notices: the hub's client."""

    def note(self, kind: str, /, **values: Any) -> None:
        """Something happened."""


class Watcher:
    """Asks for notices of the node that it runs on, which users know as ``node``, and reports them to ``hub``."""

    def __init__(self, hub: Listener, node: str) -> None:
        self._hub, self._node = hub, node
        self._node_id = ray.get_runtime_context().get_node_id()
        self._metadata = InstanceMetadata(os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT)
        self._unanswered = 0
        self._told: set[str] = set()

    def watch(self) -> None:
        """Ask until there is a notice and the node is being drained."""
        while not self._drained():
            time.sleep(POLL_S)

    def _drained(self) -> bool:
        try:
            notice = self._metadata.notice(time.time())
            if notice is not None:
                self._tell("spot_notice", action=notice.action, deadline_at=notice.deadline_at)
                with contextlib.suppress(ray.exceptions.RayError):  # the next look tries again
                    drain(self._node_id, f"spot notice: {notice.action}", notice.deadline_at)
                    return True
            elif self._metadata.rebalance_recommended():
                self._tell("spot_rebalance")
            self._unanswered = 0
        except MetadataError as error:
            self._unanswered += 1
            if self._unanswered == UNANSWERED:
                self._tell("spot_unwatched", reason=str(error))
        return False

    def _tell(self, kind: str, **values: Any) -> None:
        """Once."""
        if kind not in self._told:
            self._told.add(kind)
            self._hub.note(kind, node=self._node, source=self._metadata.endpoint, **values)


class Watchers:
    """The watchers of one run. ``hub``: hears of notices; ``tell``: writes an event."""

    def __init__(self, hub: Listener, tell: Callable[..., None]) -> None:
        self._hub, self._tell = hub, tell
        self._running: dict[str, tuple[Any, Any]] = {}  # by node: the actor, and its outstanding call
        self._died: Counter[str] = Counter()

    def look(self, alive: Sequence[NodeResources], leaving: Collection[str]) -> None:
        """Have a watcher on each spot node that nobody drains yet. Waits for nothing."""
        names = {node.node_id: node.name for node in alive if node.spot and node.node_id not in leaving}
        for node_id in self._running.keys() - names.keys():
            self._forget(node_id)
        for node_id in names.keys() - self._running.keys():
            self._start(node_id, names[node_id])
        for node_id, (actor, call) in list(self._running.items()):
            if call is None or not ray.wait([call], timeout=0)[0]:
                continue
            self._running[node_id] = actor, None
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                self._died[node_id] += 1
                if self._died[node_id] <= RESTARTS:
                    self._start(node_id, names[node_id])
                else:
                    reason = str(error).strip().splitlines()[0]
                    self._tell("spot_unwatched", node=names[node_id], source=None, reason=reason)

    def close(self) -> None:
        """The run is over."""
        for node_id in list(self._running):
            self._forget(node_id)

    def _start(self, node_id: str, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        watcher: Any = ray.remote(Watcher)
        actor = watcher.options(num_cpus=0, scheduling_strategy=here, enable_task_events=False).remote(self._hub, name)
        self._running[node_id] = actor, actor.watch.remote()

    def _forget(self, node_id: str) -> None:
        actor, _ = self._running.pop(node_id)
        # A node that is drained ends by itself once nothing runs on it any more.
        ray.kill(actor)
