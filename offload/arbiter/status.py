"""What the arbiter shows of a cluster: who holds what and why, what others hold, and what more would bring. Pure.

Where it stops: :mod:`offload.arbiter.text` and :mod:`offload.arbiter.page` draw it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from offload.arbiter.handover import amounts, most
from offload.arbiter.ledger import Ledger, Tenant, due
from offload.arbiter.values import same
from offload.model.allocation.values import Holding, Rules
from offload.model.allocation.what_if import WhatIf, what_if
from offload.model.others import Amounts, summed
from offload.model.placement import NodeResources

MOST_SPANS = 5000  # of all runs together, in the memory of the arbiter


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A node of the cluster, and how many of its CPUs and GPUs are in use.

    Args:
        node_id, address: its names.
        gpu_type: the kind of its GPUs; None if it has none or that is unknown.
        cpus, gpus: what it has.
        cpus_of_runs, gpus_of_runs: what the runs hold.
        cpus_of_others, gpus_of_others: what other programs hold.
    """

    node_id: str
    address: str
    gpu_type: str | None
    cpus: float
    gpus: float
    cpus_of_runs: float
    gpus_of_runs: float
    cpus_of_others: float
    gpus_of_others: float


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run that shares the cluster.

    Args:
        name: its name on the cluster.
        since: when it was submitted, in seconds since 1970.
        priority, preemptible: what its user has set.
        weight: what its user has set, or :func:`offload.arbiter.weigh` since then.
        workers_allowed: the least and the most workers that its user allows.
        holding: what it holds, as it has reported.
        may_hold: what it may hold by its newest lease.
        to_hold: what it is to hold as soon as others have let go of it.
        reason: why.
        doing: what it waits for or changes, in words; empty if nothing.
        lease_number: how often what it may hold has changed.
        expires_at: when its lease ends unless it reports, in seconds since 1970.
        speedup: its goodput relative to that of an equal share of the cluster; None before it was measured.
        what_if: its goodput, and the one with more; None before it was measured.
    """

    name: str
    since: float
    priority: int
    weight: float
    preemptible: bool
    workers_allowed: tuple[int, int]
    holding: Holding
    may_hold: Holding
    to_hold: Holding
    reason: str
    doing: str
    lease_number: int
    expires_at: float
    speedup: float | None
    what_if: WhatIf | None


@dataclass(frozen=True, kw_only=True)
class Span:
    """What a run held from one time to another, in seconds since 1970. ``until`` is None while it holds it."""

    run: str
    since: float
    until: float | None
    kind: str | None
    workers: int
    cores: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """The cluster as its arbiter sees it.

    Args:
        at: when, in seconds since 1970, like all times.
        started_at: when the arbiter has started.
        rules: what the cluster's owner wants.
        nodes: the nodes and their use.
        runs: the runs, those of higher priority first, then the oldest.
        others: what other programs hold, by node id and resource.
        next_decision_at: when it decides anew if nobody comes or goes; None if it has nothing to decide.
        history: what the runs held over time, in the order of its begin. Old spans are forgotten.
    """

    at: float
    started_at: float
    rules: Rules
    nodes: tuple[NodeStatus, ...]
    runs: tuple[RunStatus, ...]
    others: Amounts
    next_decision_at: float | None
    history: tuple[Span, ...]


class History:
    """What the runs held over time, at most ``most`` spans that have ended."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._ended: deque[Span] = deque(maxlen=most)
        self._open: dict[str, Span] = {}

    def follow(self, held: Mapping[str, Holding], at: float) -> None:
        """Note what each run holds from now on. A run that is missing has ended."""
        for name in [*self._open.keys() - held.keys()]:
            self._ended.append(replace(self._open.pop(name), until=at))
        for name, holding in held.items():
            span = _span(name, holding, at)
            before = self._open.get(name)
            if before is None or replace(before, since=at) != span:
                if before is not None:
                    self._ended.append(replace(before, until=at))
                self._open[name] = span

    def spans(self) -> tuple[Span, ...]:
        """All spans in the order of their begin."""
        return tuple(sorted([*self._ended, *self._open.values()], key=lambda span: (span.since, span.run)))


def status_of(ledger: Ledger, history: Iterable[Span], addresses: Mapping[str, str], at: float) -> Status:
    """The status at one time. ``addresses``: those of the nodes by their names in the ledger."""
    tenants = ledger.tenants.values()
    of_runs = summed(*(amounts(tenant.report.job.worker, tenant.report.job.present) for tenant in tenants))
    others = summed(ledger.others, *ledger.silent.values())
    next_at = due(ledger) if tenants else math.inf
    order = sorted(tenants, key=lambda t: (-t.report.job.priority, t.report.since, t.report.job.name))
    return Status(
        at=at,
        started_at=ledger.started_at,
        rules=ledger.rules,
        nodes=tuple(
            _node(node, addresses.get(node.name, node.name), of_runs.get(node.name, {}), others.get(node.name, {}))
            for node in ledger.nodes
        ),
        runs=tuple(_run(tenant, ledger) for tenant in order),
        others=others,
        next_decision_at=max(next_at, at) if math.isfinite(next_at) else None,
        history=tuple(history),
    )


def _span(name: str, holding: Holding, at: float) -> Span:
    return Span(
        run=name,
        since=at,
        until=None,
        kind=holding.kind if holding.worker_count else None,
        workers=holding.worker_count,
        cores=holding.core_count,
    )


def _node(
    node: NodeResources, address: str, of_runs: Mapping[str, float], of_others: Mapping[str, float]
) -> NodeStatus:
    return NodeStatus(
        node_id=node.name,
        address=address,
        gpu_type=node.gpu_type,
        cpus=node.cpus,
        gpus=node.gpus,
        cpus_of_runs=of_runs.get("CPU", 0.0),
        gpus_of_runs=of_runs.get("GPU", 0.0),
        cpus_of_others=of_others.get("CPU", 0.0),
        gpus_of_others=of_others.get("GPU", 0.0),
    )


def _run(tenant: Tenant, ledger: Ledger) -> RunStatus:
    job, lease = tenant.job, tenant.lease
    return RunStatus(
        name=job.name,
        since=tenant.report.since,
        priority=job.priority,
        weight=job.weight,
        preemptible=job.preemptible,
        workers_allowed=job.workers,
        holding=job.present,
        may_hold=lease.holding,
        to_hold=lease.allotment.holding,
        reason=lease.reason,
        doing=_doing(tenant, ledger),
        lease_number=lease.number,
        expires_at=lease.expires_at,
        speedup=lease.allotment.speedup,
        what_if=what_if(job, ledger.nodes),
    )


def _doing(tenant: Tenant, ledger: Ledger) -> str:
    held, may, to = tenant.report.job.present, tenant.lease.holding, tenant.lease.allotment.holding
    if ledger.decided_at is None:
        return "waits for the first decision"
    if not same(most(held, may), may):
        return "gives back what it may no longer hold"
    if not to.worker_count:
        return "waits for room"
    if not same(may, to):
        return "waits until others let go of the rest"
    return "" if same(held, may) else "takes up what it may hold"
