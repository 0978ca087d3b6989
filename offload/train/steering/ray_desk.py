"""The desk as a named actor of Ray, which outlives the run's program for a moment, and removes what that leaves behind.

Ray ends the actors that a process has made when the process ends. A placement group, however, belongs to the *job*: one that an actor
made stays until both the actor and its job have ended. So the run's actor for the desk is detached, which nobody's end ends. It waits
for an answer whose owner is the process that called ``fit()``. When that process ends, however it ends, Ray reports a lost owner, and the
desk removes the run's placement groups and ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from offload.train.cluster.holdings import ARBITER, NAMESPACE
from offload.train.steering.desk import Desk
from offload.train.steering.messages import RunState

SETTLED_S = 3.0  # time in which the dying processes of a run may still make placement groups
LOOK_S = 0.5
UNWATCHED_S = 60.0  # a program makes nothing before its desk watches


class RayDesk(Desk):
    """See :class:`Desk`. ``rooms``: how the names of the run's placement groups begin."""

    def __init__(self, state: RunState, rooms: str) -> None:
        super().__init__(state)
        self._rooms = rooms
        self._me = ray.get_runtime_context().current_actor
        self._over, self._watched = threading.Event(), threading.Event()
        threading.Thread(target=self._until_watched, daemon=True, name="unwatched").start()

    def __repr__(self) -> str:
        return f"{self.state().name} desk"

    def stay(self) -> None:
        """Answer once the run is over. Whoever called this owns the answer, and :meth:`watch` learns of its end."""
        self._over.wait()

    def watch(self, answers: list[Any]) -> None:
        """Watch from now on whether the owner of this answer of :meth:`stay` lives."""
        self._watched.set()
        threading.Thread(target=self._until_end_of, args=(answers[0],), daemon=True, name="watch").start()

    def _until_watched(self) -> None:
        """End if nobody calls :meth:`watch`: the program has ended before it made anything."""
        if not self._watched.wait(UNWATCHED_S):
            self._end()

    def _until_end_of(self, answer: Any) -> None:
        """Wait until the owner of an answer has ended; remove what the run has left, and end."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(answer)
        self._tell_arbiter()
        until = time.monotonic() + SETTLED_S
        while remove_groups(self._rooms) or time.monotonic() < until:
            time.sleep(LOOK_S)
        self._end()

    def _tell_arbiter(self) -> None:
        """Let the arbiter, if the cluster has one, give what the run held to others at once."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            arbiter = ray.get_actor(ARBITER, namespace=NAMESPACE)
            arbiter.depart.remote(self.state().name).future().add_done_callback(Future.exception)

    def _end(self) -> None:
        # Not `exit_actor`: it ends an actor from one of its calls, and waits for all others.
        ray.kill(self._me)


def remove_groups(names: str) -> bool:
    """Remove the placement groups whose names begin so. Return whether there were any."""
    there = [
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group)))
        for group, entry in placement_group_table().items()
        if entry["name"].startswith(names) and entry["state"] != "REMOVED"
    ]
    for group in there:
        remove_placement_group(group)
    return bool(there)
