"""Who holds what: the joint allocation of workers and preprocessing cores among the jobs of one cluster.

First counts (:mod:`counts`), then nodes (:mod:`placing`). Priority decides who has its least workers; weights and fairness decide the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from offload.errors import ConfigError
from offload.formatting import count as amount
from offload.model.allocation.choices import Choices, Cluster, choices_of, goodput_at, hastened, restart_factor
from offload.model.allocation.counts import ROUNDING, Counted, Programme, choose, cost_of, share_of
from offload.model.allocation.placing import Wanted, place, spreads
from offload.model.allocation.values import Allotment, Holding, Job, Rules, check_names
from offload.model.placement import NodeResources, beside

ROUNDS = 3  # of counting, while jobs are left out that were counted and fit no gap


@dataclass(frozen=True, eq=False)
class Decision:
    """The allotments of one decision, with the cost of the counts and the bound of :class:`~offload.model.allocation.counts.Counted`."""

    allotments: Mapping[str, Allotment]
    cost: float
    bound: float


def allocate(jobs: Sequence[Job], nodes: Sequence[NodeResources], rules: Rules) -> dict[str, Allotment]:
    """What each job is to hold, by its name.

    The capacity of no node is exceeded. Jobs that are not preemptible keep their workers where they are, and no fewer cores.
    Equal arguments give equal results.

    Raises ConfigError if two jobs or two nodes have the same name, or if a job that keeps what it holds, holds more than there is.
    """
    return dict(decide(jobs, nodes, rules).allotments)


def decide(jobs: Sequence[Job], nodes: Sequence[NodeResources], rules: Rules) -> Decision:
    """:func:`allocate`, with how near the counts are to the best ones."""
    check_names([job.name for job in jobs], "jobs")
    check_names([node.name for node in nodes], "nodes")
    names = {node.name for node in nodes}
    pinned = [job for job in jobs if job.pinned]
    free = _without(nodes, pinned, {job.name: job.present for job in pinned})
    sharing = [_on_these_nodes(job, names) for job in jobs if not job.pinned]
    # Sorted, so that the order in which jobs are listed does not matter.
    sharing.sort(key=lambda job: job.name)
    cluster = Cluster(free, len(sharing))
    sharing = [_measured_here(job, cluster) for job in sharing]
    within = _beside_pinned(rules, pinned)
    all_tables = tables = [choices_of(job, cluster, within) for job in sharing]
    sharing = hastened(sharing, tables, rules.shorter_first)
    counted = _by_priority(sharing, tables, cluster, within)
    first, placed = counted.chosen, _placed(sharing, tables, counted.chosen, cluster, within)
    for _ in range(ROUNDS):
        # Counted, but no gap between the others holds it: what was reserved for it is for those that fit.
        left_out = {
            job.name for job, c in zip(sharing, counted.chosen, strict=True) if c and not placed[job.name].workers
        }
        if not left_out:
            break
        tables = [
            _only(table, [0]) if job.name in left_out else table for job, table in zip(sharing, tables, strict=True)
        ]
        counted = _by_priority(sharing, tables, cluster, within)
        placed = _placed(sharing, tables, counted.chosen, cluster, within)
    allotments = {
        job.name: _explained(job, table, c, placed.get(job.name, Holding()), within)
        for job, table, c in zip(sharing, all_tables, first, strict=True)
    }
    holdings = {job.name: job.present for job in pinned} | placed
    for job in sorted(pinned, key=lambda job: (-job.priority, -job.age_s, job.name)):
        beside_it = _without(nodes, [other for other in jobs if other.name in holdings and other is not job], holdings)
        allotments[job.name] = _kept(job, beside_it, rules)
        holdings[job.name] = allotments[job.name].holding
    return Decision({job.name: allotments[job.name] for job in jobs}, counted.cost, counted.bound)


def _placed(
    jobs: Sequence[Job], tables: Sequence[Choices], chosen: Sequence[int], cluster: Cluster, rules: Rules
) -> dict[str, Holding]:
    """What each job holds with these choices, by its name: nothing for one that fits no gap between the others."""
    free = cluster.nodes
    wanted = _wanted(jobs, tables, chosen, _with_spare_cores(jobs, tables, chosen, cluster.cpus, rules))
    placed = place(wanted, free, may_move=False)
    price = partial(_cost, jobs, tables, rules)
    if any(
        spreads(w, placed[w.job.name].worker_count, len(placed[w.job.name].workers), free)
        for w in wanted
        if not w.stands
    ):
        placed = min(placed, place(wanted, free, may_move=True), key=price)
    if any(now.workers and not now.same_workers(w.job.present) for w, now in _of_holders(wanted, placed)):
        # Nodes may hold less than was counted: a restart for it must still be worth it.
        staying = _staying(tables, chosen, rules)
        stayed = place(
            _wanted(jobs, tables, staying, _with_spare_cores(jobs, tables, staying, cluster.cpus, rules)),
            free,
            may_move=False,
        )
        if all(stayed[w.job.name].workers for w in wanted):
            placed = min(stayed, placed, key=price)
    urgent = [w.job.priority for w in wanted if not placed[w.job.name].workers]
    if urgent and any(w.stands and w.job.priority < max(urgent) for w in wanted):
        # Whoever is less urgent gives way, and is placed anew.
        yielding = [replace(w, stands=w.stands and w.job.priority >= max(urgent)) for w in wanted]
        anew = place(yielding, free, may_move=True)
        if _first_served(wanted, anew) > _first_served(wanted, placed):
            placed = anew
    return {job.name: placed.get(job.name, Holding()) for job in jobs}


def _first_served(wanted: Sequence[Wanted], placed: Mapping[str, Holding]) -> list[tuple[int, int]]:
    """How many jobs of each priority have workers, the highest priority first."""
    served: dict[int, int] = {w.job.priority: 0 for w in wanted}
    for want in wanted:
        served[want.job.priority] += bool(placed[want.job.name].workers)
    return sorted(served.items(), reverse=True)


def _wanted(
    jobs: Sequence[Job], tables: Sequence[Choices], chosen: Sequence[int], cores: Sequence[int]
) -> list[Wanted]:
    return [
        Wanted(
            job=job,
            kind=table.kinds[c] or "",
            workers=int(table.workers[c]),
            cores=mine,
            stands=bool(table.stands[c]),
            goodput=partial(goodput_at, job, table.kinds[c], mine),
        )
        for job, table, c, mine in zip(jobs, tables, chosen, cores, strict=True)
        if table.workers[c] > 0
    ]


def _of_holders(wanted: Sequence[Wanted], placed: Mapping[str, Holding]) -> list[tuple[Wanted, Holding]]:
    return [(want, placed[want.job.name]) for want in wanted if want.job.present.workers]


def _staying(tables: Sequence[Choices], chosen: Sequence[int], rules: Rules) -> list[int]:
    """The choices, but with workers where they are for each job that may keep them, and no more cores than chosen."""
    staying = []
    for table, c in zip(tables, chosen, strict=True):
        standing = [k for k in range(len(table.kinds)) if table.stands[k] and table.kinds[k] and c]
        within = [
            k for k in standing if table.cores[k] <= table.cores[c] and table.usd_per_hour[k] <= table.usd_per_hour[c]
        ]
        if within:
            staying.append(max(within, key=lambda k: float(table.cores[k])))
        elif standing and rules.usd_per_hour is None:
            staying.append(min(standing, key=lambda k: float(table.cores[k])))
        else:
            staying.append(c)
    return staying


def _with_spare_cores(
    jobs: Sequence[Job], tables: Sequence[Choices], chosen: Sequence[int], cpus: float, rules: Rules
) -> list[int]:
    """The cores of the choices, and what they leave over, for those that are furthest from enough.

    Choices count cores in steps. What is left between the steps costs no restart. What nobody is known to need, jobs without measurements
    share: they may be bound by their input, and cores that cost nothing would be idle meanwhile.
    """
    cores = [int(table.cores[c]) for table, c in zip(tables, chosen, strict=True)]
    enough = [int(table.enough[c]) for table, c in zip(tables, chosen, strict=True)]
    left = int(cpus - sum(table.cpus[c] for table, c in zip(tables, chosen, strict=True)) + ROUNDING)
    if rules.usd_per_hour is not None and rules.usd_per_core_hour:
        spent = sum(float(table.usd_per_hour[c]) for table, c in zip(tables, chosen, strict=True))
        left = min(left, int((rules.usd_per_hour - spent) / rules.usd_per_core_hour + ROUNDING))
    short = [(have / want, j) for j, (have, want) in enumerate(zip(cores, enough, strict=True)) if have < want]
    heapq.heapify(short)
    while left > 0 and short:
        _, j = heapq.heappop(short)
        cores[j] += 1
        left -= 1
        if cores[j] < enough[j]:
            heapq.heappush(short, (cores[j] / enough[j], j))
    if not rules.usd_per_core_hour:
        new = [(cores[j], j) for j, c in enumerate(chosen) if tables[j].workers[c] > 0 and not jobs[j].measured]
        heapq.heapify(new)
        while left > 0 and new:
            _, j = heapq.heappop(new)
            if cores[j] < jobs[j].cores[1]:
                cores[j] += 1
                left -= 1
                heapq.heappush(new, (cores[j], j))
    return cores


def _without(
    nodes: Sequence[NodeResources], jobs: Sequence[Job], holdings: Mapping[str, Holding]
) -> tuple[NodeResources, ...]:
    """The nodes without what these jobs hold. Raises ConfigError if they hold more than there is."""
    held: dict[str, dict[str, float]] = {node.name: {} for node in nodes}
    for job in jobs:
        for name, count in holdings[job.name].workers.items():
            if name in held:
                amounts = {"CPU": job.worker.cpus, "GPU": job.worker.gpus, **job.worker.others}
                for resource, reserved in amounts.items():
                    held[name][resource] = held[name].get(resource, 0.0) + count * reserved
        for name, count in holdings[job.name].cores.items():
            if name in held:
                held[name]["CPU"] = held[name].get("CPU", 0.0) + count
    for node in nodes:
        for resource, have in (("CPU", node.cpus), ("GPU", node.gpus)):
            taken = held[node.name].get(resource, 0.0)
            if taken > have + 0.5:
                raise ConfigError(
                    f"jobs that keep what they hold, hold {taken:g} {resource}s of node {node.name}, which has {have:g}: "
                    "correct what is reported of them."
                )
    return tuple(beside(node, held[node.name]) for node in nodes)


def _measured_here(job: Job, cluster: Cluster) -> Job:
    """The job without its measurements if no node has a kind of GPU that it was measured on: it is to be measured anew."""
    rooms = cluster.room(job)
    return replace(job, step_times={}) if job.measured and rooms and not rooms.keys() & job.step_times.keys() else job


def _beside_pinned(rules: Rules, pinned: Sequence[Job]) -> Rules:
    """The rules with the budget that pinned jobs leave."""
    if rules.usd_per_hour is None:
        return rules
    spent = sum(
        job.present.worker_count * job.worker.gpus * rules.usd_per_gpu_hour.get(job.present.kind or "", 0.0)
        + (job.present.core_count + job.present.worker_count * job.worker.cpus) * rules.usd_per_core_hour
        for job in pinned
    )
    return replace(rules, usd_per_hour=max(rules.usd_per_hour - spent, 0.0))


def _on_these_nodes(job: Job, names: set[str]) -> Job:
    """The job without workers if one of their nodes is gone: those that are left must restart anyway."""
    cores = {name: count for name, count in job.present.cores.items() if name in names}
    if any(name not in names for name in job.present.workers):
        return replace(job, present=Holding(cores=cores))
    return replace(job, present=replace(job.present, cores=cores))


def _by_priority(jobs: Sequence[Job], tables: Sequence[Choices], cluster: Cluster, rules: Rules) -> Counted:
    """Counts in which jobs of higher priority have something before those of lower priority."""
    if not jobs:
        return Counted((), 0.0, 0.0)
    # Among equals, who holds something keeps it, then who waits longest is first.
    order = sorted(range(len(jobs)), key=lambda j: (not jobs[j].present.workers, -jobs[j].age_s, jobs[j].name))
    rank = [0] * len(jobs)
    for place_in_line, j in enumerate(order):
        rank[j] = place_in_line
    budget = rules.usd_per_hour

    def programme(tables: Sequence[Choices]) -> Programme:
        weights = [job.weight for job in jobs]
        return Programme.of(tables, weights, rules.fairness, cluster.gpus, cluster.cpus, cluster.others, budget, rank)

    classes = sorted({job.priority for job in jobs}, reverse=True)
    must, before = [False] * len(jobs), [0] * len(jobs)
    for priority in classes[:-1]:
        # Only the least that each job of this class and those above needs: the rest is decided with all others.
        admitted = [
            _only(table, _least(table) if job.priority >= priority else [0])
            for job, table in zip(jobs, tables, strict=True)
        ]
        before = list(choose(programme(admitted), must, rules.exact_up_to, before).chosen)
        must = [c > 0 for c in before]
    start = [_least(table)[c] for table, c in zip(tables, before, strict=True)]
    return choose(programme(tables), must, rules.exact_up_to, start)


def _least(table: Choices) -> list[int]:
    """The places of nothing, and for each kind of the fewest workers and cores that make progress."""
    places = [0]
    for kind in dict.fromkeys(table.kinds[1:]):
        mine = [c for c in range(1, len(table.kinds)) if table.kinds[c] == kind]
        places.append(min(mine, key=lambda c: (table.workers[c], table.cores[c], c)))
    return places


def _only(table: Choices, places: list[int]) -> Choices:
    arrays = ("workers", "nodes", "cores", "gpus", "cpus", "usd_per_hour", "goodput", "worth", "stands", "enough")
    return replace(
        table, kinds=tuple(table.kinds[c] for c in places), **{name: getattr(table, name)[places] for name in arrays}
    )


def _cost(jobs: Sequence[Job], tables: Sequence[Choices], rules: Rules, placed: Mapping[str, Holding]) -> float:
    """The cost of what is really placed: some jobs span more nodes than counted, others moved."""
    total = 0.0
    for job, table in zip(jobs, tables, strict=True):
        held = placed.get(job.name, Holding())
        worth = 0.0
        if held.worker_count:
            goodput = goodput_at(job, held.kind, held.core_count, held.worker_count, len(held.workers))
            worth = goodput / table.fair_goodput if table.fair_goodput else goodput / max(job.workers[0], 1)
            if job.present.workers and not held.same_workers(job.present):
                worth *= float(restart_factor(job, np.array([goodput]))[0])
        total += share_of(job.weight, rules.fairness) * float(cost_of(np.array([worth]), rules.fairness)[0])
    return total


def _kept(job: Job, nodes: Sequence[NodeResources], rules: Rules) -> Allotment:
    """What a job holds that is not preemptible, and what it can use of what all others leave of the ``nodes``."""
    now = job.present
    if now.kind in job.step_times and rules.usd_per_hour is None:
        alone = allocate([replace(job, preemptible=True)], nodes, rules)[job.name].holding
        workers = all(alone.workers.get(name, 0) >= count for name, count in now.workers.items())
        if workers and alone.core_count >= now.core_count and alone != now:
            more = f"{amount(alone.worker_count - now.worker_count, 'worker')} and "
            more += amount(alone.core_count - now.core_count, "core")
            return Allotment(
                holding=alone,
                goodput=goodput_at(job, alone.kind, alone.core_count, alone.worker_count, len(alone.workers)),
                speedup=None,
                restarts=not alone.same_workers(now),
                reason=f"keeps its workers, since it is not preemptible, and takes {more} more that others leave",
            )
    return Allotment(
        holding=now,
        goodput=None,
        speedup=None,
        restarts=False,
        reason="keeps what it holds: it is not preemptible",
    )


def _explained(job: Job, table: Choices, chosen: int, held: Holding, rules: Rules) -> Allotment:
    before, now = job.present.worker_count, held.worker_count
    restarts = bool(now) and bool(before) and not held.same_workers(job.present)
    goodput = speedup = None
    if job.measured and now:
        goodput = goodput_at(job, held.kind, held.core_count, now, len(held.workers))
        speedup = goodput / table.fair_goodput if table.fair_goodput else None
    elif job.measured:
        goodput, speedup = 0.0, 0.0
    has = f"{amount(now, 'worker')}{_on(held.kind)} and {amount(held.core_count, 'core')}"
    if not now:
        why = _why_nothing(job, table, chosen, before, rules)
    elif not job.measured:
        why = f"{has}: to be measured"
    else:
        why = f"{has}: goodput {goodput:.4g}/s, {speedup or 0.0:.2f} × that of an equal share"
        if before and now == before and not restarts:
            why += "; its workers stay"
        elif before and now == before:
            why += "; its workers move, to pack the nodes"
        elif before:
            why += f"; had {amount(before, 'worker')}, and the change is worth a restart of {job.restart_s:.3g} s"
    return Allotment(holding=held, goodput=goodput, speedup=speedup, restarts=restarts, reason=why)


def _on(kind: str | None) -> str:
    return f" ({kind})" if kind else ""


def _why_nothing(job: Job, table: Choices, chosen: int, before: int, rules: Rules) -> str:
    least = max(job.workers[0], 1)
    if len(table.kinds) == 1:
        return f"waits: no node of the cluster can hold {amount(least, 'worker')} of it that would make progress"
    cheapest = float(min(table.usd_per_hour[1:]))
    if rules.usd_per_hour is not None and cheapest > rules.usd_per_hour:
        return (
            f"waits: {amount(least, 'worker')} of it would cost {cheapest:.4g} dollars an hour, and the budget has "
            f"{rules.usd_per_hour:.4g} left"
        )
    if chosen:
        return f"waits: {amount(least, 'worker')} fit the cluster, but not the gaps between the others"
    if before:
        return f"gives up {amount(before, 'worker')}: others of higher priority or need go first"
    return f"waits: others of higher priority or need hold what {amount(least, 'worker')} would take"
