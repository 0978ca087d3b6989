"""The arbiter of one cluster: runs report to it and ask it for their leases, from many threads. It holds the ledger.

A decision among many runs may take seconds. So the ledger steps outside the lock: whoever comes meanwhile leaves an event for the
next step, and gets the lease that stands. What came meanwhile shares one decision.

Where it stops: somebody else observes the cluster, and calls :meth:`Arbiter.tick` when it is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.arbiter.handover import amounts
from offload.arbiter.ledger import ClusterSeen, Departed, Event, Ledger, Reported, Tick, Weighed, due, step
from offload.arbiter.status import History, Status, status_of
from offload.arbiter.values import REPORT_S, Lease, Report
from offload.model.allocation.values import Rules
from offload.model.others import SETTLED_S, Amounts, Others, summed, without
from offload.model.placement import NodeResources

ANSWER_S = 1.0  # a run that has a lease waits at most so long for a decision that is under way
POLL_S = 60.0  # the longest that one call waits for a change
GONE = 1000  # runs that have ended, and whose late reports count no more


def steady_clock() -> Callable[[], float]:
    """A clock in seconds since 1970 that nobody can set: it reads the host's clock once, and then counts by itself."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


class Arbiter:
    """See the module. ``clock``: the time in seconds since 1970, which never goes back; by default a :func:`steady_clock`."""

    def __init__(self, rules: Rules, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or steady_clock()
        self._ledger = Ledger(rules=rules, started_at=self._clock())
        self._changed = threading.Condition()
        self._events: list[Event] = []  # that no step has taken yet
        self._noted, self._stepped = 0, 0  # events
        self._stepping = False
        self._history = History()
        self._departed: dict[str, float] = {}  # when the run that has left was submitted
        self._looking = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._sure: Others | None = None
        self._likely = Others({}, settled_s=REPORT_S + SETTLED_S)

    # -- runs ------------------------------------------------------------------------------------------------------

    def report(self, report: Report) -> Lease:
        """Note what a run says of itself, and answer with its lease. A run that has none yet waits for its first decision.

        The reports of one run come in their order if it waits for the answer to one before it sends the next.

        Raises:
            LookupError: if the run has departed.
        """
        name = report.job.name
        with self._changed:
            if self._departed.get(name) == report.since:
                raise LookupError(f"run {name} has departed")
            known = name in self._ledger.tenants
        self._note(lambda at: Reported(at=at, report=report), ANSWER_S if known else None)
        with self._changed:
            tenant = self._ledger.tenants.get(name)
            if tenant is None:
                raise LookupError(f"run {name} has departed")
            return tenant.lease

    def changed(self, name: str, number: int, timeout_s: float) -> Lease | None:
        """Wait until the run's lease has another number than ``number``, and return it; None if that is not so within ``timeout_s``, or
        within ``POLL_S``. A run that is not known has no lease."""

        def news() -> Lease | None:
            tenant = self._ledger.tenants.get(name)
            return tenant.lease if tenant is not None and tenant.lease.number != number else None

        with self._changed:
            return self._changed.wait_for(news, min(timeout_s, POLL_S))

    def depart(self, name: str) -> None:
        """Note that a run has ended, and holds nothing any more."""
        with self._changed:
            if (tenant := self._ledger.tenants.get(name)) is not None:
                self._departed[name] = tenant.report.since
                while len(self._departed) > GONE:
                    del self._departed[next(iter(self._departed))]
        self._note(lambda at: Departed(at=at, name=name), ANSWER_S)

    def weigh(self, name: str, weight: float) -> bool:
        """Give a run this weight from now on, in place of its own. Return whether there is such a run."""
        with self._changed:
            known = name in self._ledger.tenants
        if known:
            self._note(lambda at: Weighed(at=at, name=name, weight=weight), ANSWER_S)
        return known

    # -- the cluster -----------------------------------------------------------------------------------------------

    def see(self, nodes: Sequence[NodeResources], in_use: Amounts) -> None:
        """Note what the cluster has, and what is in use, by node id and resource, whoever uses it. Leases name nodes by their ids.

        What runs may hold by their leases is theirs. What more than that is in use for a while, others hold. So do they if a run has not
        reported for long that it has taken up what it may.
        """
        with self._looking:
            self._addresses = {node.node_id: node.name for node in nodes}
            # Several nodes may have one address.
            named = sorted((replace(node, name=node.node_id) for node in nodes), key=lambda node: node.name)
            seen = self._seen(tuple(named), in_use)
        if seen is not None:
            self._note(lambda at: replace(seen, at=at), ANSWER_S)

    def tick(self) -> None:
        """Let time pass."""
        self._note(lambda at: Tick(at=at), None)

    def due_in_s(self) -> float:
        """The seconds until the next :meth:`tick` may change something, negative if it is late; infinite if none will."""
        return due(self._ledger) - self._clock()

    def status(self) -> Status:
        """Who holds what and why."""
        with self._changed:
            ledger, spans = self._ledger, self._history.spans()
        return status_of(ledger, spans, self._addresses, self._clock())

    def _seen(self, nodes: tuple[NodeResources, ...], in_use: Amounts) -> ClusterSeen | None:
        """What the ledger should learn of the cluster; None if it knows that."""
        ledger, now = self._ledger, self._clock()
        tenants = [(tenant.report.job, tenant.reserved) for tenant in ledger.tenants.values()]
        present = summed(*(amounts(job.worker, job.present) for job, _ in tenants))
        reserved = summed(*(amounts(job.worker, reserved) for job, reserved in tenants))
        whole = {node.name: {"CPU": node.cpus, "GPU": node.gpus, **node.others} for node in nodes}
        there = {node: of_node for node, of_node in in_use.items() if node in whole}
        sure, likely = without(there, reserved), without(there, present)
        self._sure = self._sure or Others(sure)
        self._sure.see(sure, now)
        self._likely.see(likely, now)
        # Ray's amounts lag: what runs hold must not seem to have lost its room.
        others = _largest(
            _smallest(self._sure.held, without(whole, reserved)), _smallest(self._likely.held, without(whole, present))
        )
        if (nodes, others) == (ledger.nodes, ledger.others) and not ledger.silent:
            return None
        return ClusterSeen(at=now, nodes=nodes, others=others)

    # -- the ledger ------------------------------------------------------------------------------------------------

    def _note(self, event: Callable[[float], Event], patience_s: float | None) -> None:
        """Leave an event, and wait until a step has taken it, in another thread at most for ``patience_s``; None: as long as that takes."""
        until = None if patience_s is None else time.monotonic() + patience_s
        with self._changed:
            self._events.append(event(self._clock()))
            self._noted += 1
            mine = self._noted
            while self._stepped < mine:
                if not self._stepping:
                    self._step()
                    continue
                left_s = None if until is None else max(until - time.monotonic(), 0.0)
                if not self._changed.wait_for(lambda: self._stepped >= mine or not self._stepping, left_s):
                    return  # the next event takes this one along

    def _step(self) -> None:
        """Take all events into the ledger, without the lock, which the caller has."""
        events, self._events, before = self._events, [], self._ledger
        self._stepping = True
        self._changed.release()
        after = before
        try:
            after, _ = step(before, *events)
        finally:
            self._changed.acquire()
            self._ledger, self._stepping = after, False
            self._stepped += len(events)
            held = {name: tenant.report.job.present for name, tenant in after.tenants.items()}
            self._history.follow(held, events[-1].at)
            self._changed.notify_all()


def _smallest(one: Amounts, other: Amounts) -> dict[str, dict[str, float]]:
    return _without_zeros(
        {
            node: {name: min(value, other.get(node, {}).get(name, 0.0)) for name, value in of_node.items()}
            for node, of_node in one.items()
        }
    )


def _largest(one: Amounts, other: Amounts) -> dict[str, dict[str, float]]:
    return {
        node: {
            name: max(one.get(node, {}).get(name, 0.0), other.get(node, {}).get(name, 0.0))
            for name in {**one.get(node, {}), **other.get(node, {})}
        }
        for node in {**one, **other}
    }


def _without_zeros(all_amounts: Amounts) -> dict[str, dict[str, float]]:
    kept = {node: {name: v for name, v in of_node.items() if v > 0} for node, of_node in all_amounts.items()}
    return {node: of_node for node, of_node in kept.items() if of_node}
