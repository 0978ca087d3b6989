"""Watch for spot notices: on each spot node, a small process polls for a notice and then drains its node.

The run then reacts as to any drained node (:mod:`offload.train.driver.fleet`): it commits and goes on without the node. This module
imports neither torch nor Ray Train, since the watchers do not need them. Where it stops: it polls only AWS's metadata service. On
other clouds, users or their tools call ``ray drain-node`` (docs/spot.md).
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

from offload.ray_private.draining import drain
from offload.report.events import RunEvent, SpotNoticed, SpotRebalance, SpotUnwatched
from offload.train.cluster.instance_metadata import ENDPOINT, ENDPOINT_VARIABLE, InstanceMetadata, MetadataError

if TYPE_CHECKING:
    from offload.model.placement import NodeResources

POLL_S = 2.0
UNANSWERED = 3  # unanswered polls in a row after which the run reports it
RESTARTS = 3  # restarts of a watcher whose process dies; Ray would report its own restarts on the user's terminal


class Listener(Protocol):
    """The receiver of notices: the hub's client."""

    def note(self, event: RunEvent) -> None:
        """Something happened."""


class Watcher:
    """The actor that polls for notices of its own node, which users know as ``node``, and reports them to ``hub``."""

    def __init__(self, hub: Listener, node: str) -> None:
        self._hub, self._node = hub, node
        self._node_id = ray.get_runtime_context().get_node_id()
        self._metadata = InstanceMetadata(os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT)
        self._unanswered = 0
        self._reported: set[type[RunEvent]] = set()

    def __repr__(self) -> str:
        return "spot watcher"

    def watch(self) -> None:
        """Poll until there is a notice and the node is draining."""
        while not self._drained():
            time.sleep(POLL_S)

    def _drained(self) -> bool:
        try:
            notice = self._metadata.notice(time.time())
            if notice is not None:
                self._report(
                    SpotNoticed(
                        node=self._node,
                        source=self._metadata.endpoint,
                        action=notice.action,
                        deadline_at=notice.deadline_at,
                    )
                )
                with contextlib.suppress(ray.exceptions.RayError):  # the next poll tries again
                    drain(self._node_id, f"spot notice: {notice.action}", notice.deadline_at)
                    return True
            elif self._metadata.rebalance_recommended():
                self._report(SpotRebalance(node=self._node, source=self._metadata.endpoint))
            self._unanswered = 0
        except MetadataError as error:
            self._unanswered += 1
            if self._unanswered == UNANSWERED:
                self._report(SpotUnwatched(node=self._node, source=self._metadata.endpoint, reason=str(error)))
        return False

    def _report(self, event: RunEvent) -> None:
        """Report an event, once of each kind."""
        if type(event) not in self._reported:
            self._reported.add(type(event))
            self._hub.note(event)


class Watchers:
    """The watchers of one run. ``hub`` receives notices; ``tell`` writes an event."""

    def __init__(self, hub: Listener, tell: Callable[[RunEvent], None]) -> None:
        self._hub, self._tell = hub, tell
        self._running: dict[str, tuple[Any, Any]] = {}  # by node: the actor, and its outstanding call
        self._died: Counter[str] = Counter()

    def look(self, alive: Sequence[NodeResources], leaving: Collection[str]) -> None:
        """Start a watcher on each spot node that nobody drains yet. Does not wait."""
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
                    self._tell(SpotUnwatched(node=names[node_id], source=None, reason=reason))

    def close(self) -> None:
        """End the watchers: the run is over."""
        for node_id in list(self._running):
            self._forget(node_id)

    def _start(self, node_id: str, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        watcher: Any = ray.remote(Watcher)
        actor = watcher.options(num_cpus=0, scheduling_strategy=here, enable_task_events=False).remote(self._hub, name)
        self._running[node_id] = actor, actor.watch.remote()

    def _forget(self, node_id: str) -> None:
        actor, _ = self._running.pop(node_id)
        # A drained node ends by itself once nothing runs on it.
        ray.kill(actor)
