"""A run's own side of the arbiter of its cluster: it reports, and learns of its leases.

Its threads never call Ray without a connection: Ray would start a new cluster. They end before the connection does.

Where it stops: :mod:`offload.train.driver.leasing` decides what a report says, and the run's state machine what a lease changes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from offload.arbiter.values import Lease, Report
from offload.errors import ConfigError, RunError, argument
from offload.train.cluster.holdings import ARBITER, NAMESPACE
from offload.train.cluster.ray_processes import no_new_ray
from offload.train.steering.listening import Listening

POLL_S = 30.0  # the arbiter answers after this long, whether or not there is another lease
AGAIN_S = 1.0  # Ray may be starting the arbiter again
_GONE = (ray.exceptions.RayError, RunError, RuntimeError, ValueError)


class RayTenancy:
    """The tenancy of one run. Its calls never wait, and never fail: a run keeps its last lease if the arbiter has gone.

    ``listening``: runs its threads. Raises ConfigError if the cluster has no arbiter.
    """

    def __init__(self, name: str, listening: Listening) -> None:
        self._name, self._listening = name, listening
        self._lease: Lease | None = None
        self._report: Report | None = None  # the newest that was not sent yet
        self._here = False  # whether the arbiter should know this run
        self._departures = 0
        self._lock = threading.Lock()
        self._changed: Callable[[], None] = lambda: None
        try:
            self._actor = _arbiter()
        except ValueError:
            raise ConfigError(
                "the run asks for an arbiter, and none runs on this Ray cluster: start one with offload arbiter start, or drop "
                f"{argument('arbiter', True, python='Cluster(arbiter=True)')}."
            ) from None

    @property
    def lease(self) -> Lease | None:
        """The newest lease; None before the first, and after :meth:`depart`."""
        return self._lease

    def start(self, changed: Callable[[], None]) -> None:
        """Begin to listen. ``changed`` is called from another thread when there is another lease."""
        self._changed = changed
        self._listening.start(self._send, "arbiter: send")
        self._listening.start(self._listen, "arbiter: listen")

    def report(self, report: Report) -> None:
        """Describe the run. A newer report replaces one that was not sent yet."""
        with self._lock:
            self._report, self._here = report, True
        self._listening.notify()

    def depart(self) -> None:
        """Tell the arbiter that the run holds nothing, and wants nothing for now."""
        with self._lock:
            if not self._here:
                return
            self._report, self._lease, self._here = None, None, False
            self._departures += 1
        with contextlib.suppress(*_GONE):
            self._actor.depart.remote(self._name)

    def close(self) -> None:
        """Depart: the run is over."""
        self.depart()

    def _send(self) -> None:
        """Send reports, one at a time, so that they arrive in their order."""
        while True:
            self._listening.wait_for(lambda: self._report is not None)
            with self._lock:
                report, self._report, departures = self._report, None, self._departures
            if report is None:  # the run has departed meanwhile
                continue
            try:
                with no_new_ray():
                    self._take(self._listening.answer(partial(self._actor.report.remote, report)), departures)
            except _GONE:
                self._find_again()

    def _listen(self) -> None:
        """Wait for leases that the arbiter changes between two reports."""
        while True:
            self._listening.wait_for(lambda: self._here and self._lease is not None)
            with self._lock:
                number, departures = -1 if self._lease is None else self._lease.number, self._departures
            changed = partial(self._actor.changed.remote, self._name, number, POLL_S)
            try:
                with no_new_ray():
                    self._take(self._listening.answer(changed), departures)
            except _GONE:
                self._find_again()

    def _find_again(self) -> None:
        """Wait a moment, and find the arbiter: Ray may have started it again, or somebody another one."""
        self._listening.wait_for(lambda: False, AGAIN_S)
        with contextlib.suppress(*_GONE), no_new_ray():
            self._actor = _arbiter()

    def _take(self, lease: Lease | None, departures: int) -> None:
        with self._lock:
            known = self._lease
            # An answer to what the run asked before it left is none for a run that has come back.
            if lease is None or not self._here or departures != self._departures:
                return
            # The answer to a report may come later than a change that followed it.
            if known is not None and lease.number < known.number:
                return
            self._lease = lease
            news = known is None or known.number != lease.number or known.reason != lease.reason
        self._listening.notify()
        if news:
            self._changed()


def _arbiter() -> Any:
    """The handle of the arbiter. Raises ValueError if there is none."""
    return ray.get_actor(ARBITER, namespace=NAMESPACE)
