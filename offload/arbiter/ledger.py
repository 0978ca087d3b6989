"""The ledger: who may hold what, as runs report, leave and fall silent, and as the cluster changes. A pure state machine.

``step(ledger, *events)`` returns the next ledger and the leases whose holding changed. A run whose holding stays is not disturbed::

    report ──► known run: note what it holds ──────────────► hand over ──► changed leases
               unknown run: adopt what it holds ─► decide ──►    ▲
    expiry, other nodes, other holders ────────────► decide ─────┤
    BREATH_S after a departure ────────────────────► decide ─────┤
    a run has another weight ──────────────────────► decide ─────┤
    a run's first measurement, or with more workers ► decide ────┤
    ROUND_S after the last decision ───────────────► decide ─────┘

A new ledger knows nothing of runs that may have leases from an earlier one. So it only adopts what they report until every run has had time
for one report.

Where it stops: a caller delivers the leases, observes the cluster, and calls at :func:`due`. Ray has the last word on capacity. A run that
is late for the recovery, or to which an answer came very late, may ask Ray for room that another got: Ray lets it wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offload.arbiter.handover import Claim, Room, amounts, hand_over, most
from offload.arbiter.values import LEASE_S, REPORT_S, Lease, Report, same
from offload.model.allocation.allocate import allocate
from offload.model.allocation.values import Allotment, Holding, Job, Rules
from offload.model.others import Amounts, summed
from offload.model.placement import NodeResources, beside

ROUND_S = 60.0
"""Seconds from one decision to the next if nobody comes or goes."""
BREATH_S = 1.5
"""Seconds that room stays free after a departure if nobody waits for it.

A search starts its next trial a moment after one has ended. If those who stay had taken the room, they would restart, and restart again
to give it back."""
PATIENCE_S = 2 * ROUND_S  # rounds wait so long for runs that have not yet given back what they should
GRACE_S = REPORT_S  # for its run, a lease lasts longer by the time that an answer takes


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A run has reported, at a time in seconds since 1970."""

    at: float
    report: Report


@dataclass(frozen=True, kw_only=True)
class Departed:
    """A run has ended, and holds nothing any more."""

    at: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A run has this weight from now on, in place of its own."""

    at: float
    name: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class ClusterSeen:
    """The cluster has these whole ``nodes``, and programs that are none of the ledger's runs hold ``others`` of them."""

    at: float
    nodes: tuple[NodeResources, ...]
    others: Amounts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""

    at: float


Event = Reported | Departed | Weighed | ClusterSeen | Tick


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A run in the ledger.

    Args:
        report: its newest report.
        lease: its newest lease.
        ceiling: the most that it may hold by the leases that it may know.
        weight: its weight, if somebody has changed it; None: the one that it reports.
    """

    report: Report
    lease: Lease
    ceiling: Holding
    weight: float | None = None

    @property
    def job(self) -> Job:
        """The run as the allocation sees it."""
        job = self.report.job
        return job if self.weight is None else replace(job, weight=self.weight)

    @property
    def reserved(self) -> Holding:
        """The most that it may hold now, on every node."""
        return most(self.ceiling, self.report.job.present)

    @property
    def settled(self) -> bool:
        """Whether it may hold what it is to hold, and holds no more."""
        return same(self.lease.holding, self.lease.allotment.holding) and same(self.reserved, self.lease.holding)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Everything that the arbiter knows.

    Args:
        rules: what the cluster's owner wants.
        started_at: when the ledger was empty, in seconds since 1970, like all times.
        tenants: the runs by their names.
        nodes: the whole nodes of the cluster; none before it was seen.
        others: what programs hold that are no tenants.
        silent: what runs whose lease expired may still hold, by their names, until the cluster is seen again.
        decided_at: the time of the last decision; None before the first.
        departed_at: the time of the first departure since then; None if there was none.
    """

    rules: Rules = field(default_factory=Rules)
    started_at: float
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    nodes: tuple[NodeResources, ...] = ()
    others: Amounts = field(default_factory=dict)
    silent: Mapping[str, Amounts] = field(default_factory=dict)
    decided_at: float | None = None
    departed_at: float | None = None

    @property
    def recovered_at(self) -> float:
        """When all runs have had time to report, so that it may decide."""
        return self.started_at + REPORT_S

    @property
    def settled(self) -> bool:
        """Whether no hand-over is under way."""
        return all(tenant.settled for tenant in self.tenants.values())


def step(ledger: Ledger, *events: Event) -> tuple[Ledger, dict[str, Lease]]:
    """Return the ledger after these events, and the leases of new runs and of those that may hold something else, by the names of runs.

    Events come in the order of their times. Those of one step share one decision. The answer to a report is the run's lease in the new
    ledger, changed or not.
    """
    after, urgent = ledger, False
    for event in events:
        known = set(after.tenants)
        after = _without_expired(after, event.at)
        expired = set(after.tenants) != known
        after, calls = _noted(after, event)
        urgent |= calls or expired
    at = max(event.at for event in events)
    if after.nodes and at >= after.recovered_at:
        if urgent or at >= _next_round(after):
            after = _decided(after, at)
        after = _handed_over(after, at)
    changed = {
        name: tenant.lease
        for name, tenant in after.tenants.items()
        if (before := ledger.tenants.get(name)) is None or before.lease.number != tenant.lease.number
    }
    return after, changed


def due(ledger: Ledger) -> float:
    """When the next :class:`Tick` may change something, if no other event comes before; infinite if none will."""
    times = [tenant.lease.expires_at + GRACE_S for tenant in ledger.tenants.values()]
    if times and ledger.nodes:
        times.append(_next_round(ledger))
    return min(times, default=math.inf)


def _next_round(ledger: Ledger) -> float:
    if ledger.decided_at is None:
        return ledger.recovered_at
    regular = ledger.decided_at + (ROUND_S if ledger.settled else PATIENCE_S)
    return regular if ledger.departed_at is None else min(regular, ledger.departed_at + BREATH_S)


def _without_expired(ledger: Ledger, at: float) -> Ledger:
    """The ledger without runs that fell silent. What they may hold stays reserved until the cluster is seen."""
    expired = {name: t for name, t in ledger.tenants.items() if at >= t.lease.expires_at + GRACE_S}
    held = {name: amounts(tenant.report.job.worker, tenant.reserved) for name, tenant in expired.items()}
    tenants = {name: tenant for name, tenant in ledger.tenants.items() if name not in expired}
    return replace(ledger, tenants=tenants, silent={**ledger.silent, **held})


def _noted(ledger: Ledger, event: Event) -> tuple[Ledger, bool]:
    """The ledger with what an event says, and whether that calls for a decision at once."""
    match event:
        case Reported(report=report):
            name = report.job.name
            before = ledger.tenants.get(name)
            tenant = _adopted(report, event.at) if before is None else _updated(before, report, event.at)
            silent = {other: held for other, held in ledger.silent.items() if other != name}
            urgent = before is None or _calls(before.report.job, report.job)
            return replace(ledger, tenants={**ledger.tenants, name: tenant}, silent=silent), urgent
        case Departed(at=at, name=name):
            tenants = {other: tenant for other, tenant in ledger.tenants.items() if other != name}
            silent = {other: held for other, held in ledger.silent.items() if other != name}
            departed_at = ledger.departed_at
            if departed_at is None and name in ledger.tenants:
                departed_at = at
            somebody_waits = any(not tenant.lease.holding.worker_count for tenant in tenants.values())
            return replace(ledger, tenants=tenants, silent=silent, departed_at=departed_at), somebody_waits
        case Weighed(name=name, weight=weight):
            weighed = ledger.tenants.get(name)
            if weighed is None or weighed.job.weight == weight:
                return ledger, False
            return replace(ledger, tenants={**ledger.tenants, name: replace(weighed, weight=weight)}), True
        case ClusterSeen(nodes=nodes, others=others):
            # What silent runs hold is now part of what others hold.
            urgent = (nodes, others) != (ledger.nodes, ledger.others) or bool(ledger.silent)
            return replace(ledger, nodes=nodes, others=others, silent={}), urgent
        case Tick():
            return ledger, False


def _calls(before: Job, now: Job) -> bool:
    """Whether what a run says calls for a decision at once: other terms, or measurements that let it have more than its first allotment,
    or outgrow the workers that it was measured with."""
    learned = (now.measured, now.measured_workers or 0) > (before.measured, before.measured_workers or 0)
    return learned or _terms(before) != _terms(now)


def _terms(job: Job) -> tuple[object, ...]:
    """What a user changes of a run, rather than its measurements."""
    return job.workers, job.cores, job.weight, job.priority, job.preemptible, job.worker


def _adopted(report: Report, at: float) -> Tenant:
    """A run that the ledger does not know: what it holds is its lease, unless it has one."""
    lease, expires_at = report.lease, at + LEASE_S
    if lease is not None and at < lease.expires_at:
        return Tenant(report=report, lease=replace(lease, expires_at=expires_at), ceiling=lease.holding)
    present = report.job.present
    allotment = Allotment(holding=present, goodput=None, speedup=None, restarts=False, reason="arrived just now")
    number = 0 if lease is None else lease.number + 1
    lease = Lease(number=number, holding=present, allotment=allotment, expires_at=expires_at)
    return Tenant(report=report, lease=lease, ceiling=present)


def _updated(tenant: Tenant, report: Report, at: float) -> Tenant:
    known = (
        report.lease is not None
        and report.lease.number == tenant.lease.number
        and same(report.lease.holding, tenant.lease.holding)
    )
    lease = replace(tenant.lease, expires_at=at + LEASE_S)
    return replace(tenant, report=report, lease=lease, ceiling=lease.holding if known else tenant.ceiling)


def _held_by_others(ledger: Ledger) -> dict[str, dict[str, float]]:
    return summed(ledger.others, *ledger.silent.values())


def _decided(ledger: Ledger, at: float) -> Ledger:
    """The ledger with a new allotment for each run."""
    others = _held_by_others(ledger)
    nodes = tuple(beside(node, others.get(node.name, {})) for node in ledger.nodes)
    jobs = [_as_job(tenant, at) for tenant in ledger.tenants.values()]
    allotments = allocate(_keeping_what_fits(jobs, nodes), nodes, ledger.rules)
    tenants = {
        name: replace(tenant, lease=replace(tenant.lease, allotment=allotments[name]))
        for name, tenant in ledger.tenants.items()
    }
    return replace(ledger, tenants=tenants, decided_at=at, departed_at=None)


def _as_job(tenant: Tenant, at: float) -> Job:
    """The run with what it may hold, or has been promised without another restart, so that a hand-over under way goes on."""
    lease = tenant.lease
    on_its_way = lease.holding.same_workers(lease.allotment.holding)
    present = lease.allotment.holding if on_its_way else lease.holding
    return replace(tenant.job, present=present, age_s=max(at - tenant.report.since, 0.0))


def _keeping_what_fits(jobs: list[Job], nodes: tuple[NodeResources, ...]) -> list[Job]:
    """The jobs, of which only those keep what they hold that fit the nodes together, the oldest first.

    What others hold is observed later than what runs report, so that both together may exceed a node for a moment.
    """
    room = Room(nodes, [])
    fitting = {}
    for job in sorted(jobs, key=lambda job: (-job.age_s, job.name)):
        keeps = job.pinned and room.take(job.worker, Holding(), job.present)
        fitting[job.name] = job if keeps else replace(job, preemptible=True)
    return [fitting[job.name] for job in jobs]


def _handed_over(ledger: Ledger, at: float) -> Ledger:
    """The ledger with what every run may hold from now on."""
    claims = {
        name: Claim(
            job=_as_job(tenant, at),
            allowed=tenant.lease.holding,
            reserved=tenant.reserved,
            target=tenant.lease.allotment.holding,
        )
        for name, tenant in ledger.tenants.items()
    }
    allowed = hand_over(claims, ledger.nodes, _held_by_others(ledger))
    tenants = {name: _with_holding(tenant, allowed[name]) for name, tenant in ledger.tenants.items()}
    return replace(ledger, tenants=tenants)


def _with_holding(tenant: Tenant, holding: Holding) -> Tenant:
    lease = tenant.lease
    if same(holding, lease.holding):
        return tenant
    lease = replace(lease, number=lease.number + 1, holding=holding)
    return replace(tenant, lease=lease, ceiling=most(tenant.ceiling, holding))
