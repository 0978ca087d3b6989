"""The arbiter as a named actor of Ray, which observes the cluster and ticks.

It is detached: it outlives every run, until somebody stops it. If its process ends otherwise, Ray starts it again, and it learns from the
reports of the runs what they hold. Only its history is then lost.
"""

from __future__ import annotations

import logging
import threading
import time

import ray

from offload.arbiter.arbiter import Arbiter
from offload.arbiter.status import Status
from offload.arbiter.values import Lease, Report
from offload.model.allocation.values import Rules
from offload.train.cluster.connection import alive_nodes, amounts_in_use

LOOK_S, SOON_S = 1.0, 0.1  # the most and the fewest seconds between two looks at the cluster
POLLS = 512  # runs that wait for a change at a time
GROUPS = {"polls": POLLS, "reports": 64}
"""Calls that the arbiter answers at a time, by their group. Those that wait for a change must not keep reports from it."""


class RayArbiter:
    """See :class:`~offload.arbiter.arbiter.Arbiter`."""

    def __init__(self, rules: Rules) -> None:
        self._arbiter = Arbiter(rules)
        threading.Thread(target=self._follow, daemon=True, name="follow the cluster").start()

    def __repr__(self) -> str:
        return "arbiter"

    def ready(self) -> None:
        """Answer once the arbiter runs."""

    @ray.method(concurrency_group="reports")
    def report(self, report: Report) -> Lease:
        """See :meth:`Arbiter.report`."""
        return self._arbiter.report(report)

    @ray.method(concurrency_group="polls")
    def changed(self, name: str, number: int, timeout_s: float) -> Lease | None:
        """See :meth:`Arbiter.changed`."""
        return self._arbiter.changed(name, number, timeout_s)

    @ray.method(concurrency_group="reports")
    def depart(self, name: str) -> None:
        """See :meth:`Arbiter.depart`."""
        self._arbiter.depart(name)

    @ray.method(concurrency_group="reports")
    def weigh(self, name: str, weight: float) -> bool:
        """See :meth:`Arbiter.weigh`."""
        return self._arbiter.weigh(name, weight)

    def status(self) -> Status:
        """See :meth:`Arbiter.status`."""
        return self._arbiter.status()

    def _follow(self) -> None:
        while True:
            try:
                self._arbiter.see(alive_nodes(), amounts_in_use())
                if self._arbiter.due_in_s() <= 0:
                    self._arbiter.tick()
            except Exception:
                # Runs keep what they have, and the next look may succeed.
                logging.getLogger(__name__).exception("the arbiter could not follow the cluster")
            time.sleep(min(max(self._arbiter.due_in_s(), SOON_S), LOOK_S))
