"""Hand workers and cores from one run to another: first take, then give what is really free.

Cores change one by one, since that restarts nothing. Workers change all at once, so that a run restarts once on its way.

Where it stops: the targets are decided elsewhere. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload.arbiter.values import same
from offload.model.allocation.values import Holding, Job
from offload.model.others import Amounts
from offload.model.placement import NodeResources, WorkerResources

ROUNDING = 1e-6  # sums of fractions of a CPU


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A run on its way from one holding to another.

    Args:
        job: the run; its ``present`` does not matter.
        allowed: what it may hold by its newest lease.
        reserved: the most that it may still hold: ``allowed``, what it has not yet given back, and what leases that it may not know of
            have withdrawn.
        target: what it is to hold.
    """

    job: Job
    allowed: Holding
    reserved: Holding
    target: Holding

    @property
    def settled(self) -> bool:
        """Whether it has let go of everything that it may not hold."""
        return same(self.reserved, self.allowed)


def hand_over(claims: Mapping[str, Claim], nodes: Sequence[NodeResources], others: Amounts) -> dict[str, Holding]:
    """What each run may hold from now on.

    All targets together must fit the nodes beside ``others``. Then every run reaches its target, if every run gives back what it may no
    longer hold, and this function is called again after that. What it adds never exceeds a node, whatever the runs still hold.
    """
    allowed = {name: _taken_back(claim) for name, claim in claims.items()}
    room = Room(nodes, [others, *(amounts(claim.job.worker, claim.reserved) for claim in claims.values())])
    first = sorted(claims, key=lambda name: (-claims[name].job.priority, -claims[name].job.age_s, name))
    for name in first:
        allowed[name] = _extended(claims[name], allowed[name], room)
    waiting = [
        name
        for name in first
        if allowed[name].worker_count and claims[name].job.preemptible and not _has_its_workers(claims[name], allowed)
    ]
    quiet = all(claim.settled and same(allowed[name], claim.allowed) for name, claim in claims.items())
    if waiting and quiet:
        # They wait for each other in a circle. All of them are about to restart, so the last lets go of everything before.
        allowed[waiting[-1]] = Holding()
    return allowed


def most(one: Holding, other: Holding) -> Holding:
    """The larger of both, on every node."""
    return Holding(
        kind=one.kind or other.kind,
        workers={node: max(pair) for node, *pair in _paired(one.workers, other.workers)},
        cores={node: max(pair) for node, *pair in _paired(one.cores, other.cores)},
    )


def amounts(worker: WorkerResources, holding: Holding) -> dict[str, dict[str, float]]:
    """The resources of a holding. A core is a CPU."""
    return {
        node: {
            "CPU": workers * worker.cpus + cores,
            "GPU": workers * worker.gpus,
            **{name: workers * value for name, value in worker.others.items()},
        }
        for node, workers, cores in _paired(holding.workers, holding.cores)
    }


def _has_its_workers(claim: Claim, allowed: Mapping[str, Holding]) -> bool:
    return allowed[claim.job.name].same_workers(claim.target)


def _taken_back(claim: Claim) -> Holding:
    """What is left of what a run may hold, before it gets anything."""
    now, target = claim.allowed, claim.target
    if not target.worker_count:
        return Holding()
    pairs = [(mine, wanted) for _, mine, wanted in _paired(now.workers, target.workers)]
    fewer = all(wanted <= mine for mine, wanted in pairs)
    if not fewer and any(wanted < mine for mine, wanted in pairs):
        return now  # its workers move: its cores feed them until then
    cores = {node: min(pair) for node, *pair in _paired(now.cores, target.cores)}
    return Holding(
        kind=target.kind if fewer else now.kind,
        workers=target.workers if fewer else now.workers,
        cores={node: count for node, count in cores.items() if count} if now.worker_count else {},
    )


def _extended(claim: Claim, allowed: Holding, room: Room) -> Holding:
    """What a run may hold if it gets what is free of its target: all of its workers, or no more."""
    target, worker = claim.target, claim.job.worker
    cores = {node: min(count, target.cores[node]) for node, count in allowed.cores.items() if target.cores.get(node)}
    with_workers = Holding(kind=target.kind, workers=target.workers, cores=cores)
    before = room.left()
    mine = most(claim.reserved, with_workers)
    if not target.worker_count or not room.take(worker, claim.reserved, mine):
        return allowed
    for node, wanted in target.cores.items():
        while cores.get(node, 0) < wanted:
            more = most(mine, Holding(cores={node: cores.get(node, 0) + 1}))
            if not room.take(worker, mine, more):
                break
            cores[node], mine = cores.get(node, 0) + 1, more
    if not allowed.same_workers(target) and sum(cores.values()) < min(target.core_count, max(claim.job.cores[0], 1)):
        room.restore(before)  # its workers would wait for data
        return allowed
    return Holding(kind=target.kind, workers=target.workers, cores=cores)


class Room:
    """What is free on every node; less than nothing where more is held than there is."""

    def __init__(self, nodes: Sequence[NodeResources], held: Sequence[Amounts]) -> None:
        self._free = {node.name: {"CPU": node.cpus, "GPU": node.gpus, **node.others} for node in nodes}
        for taken in held:
            for node, of_node in taken.items():
                if free := self._free.get(node):
                    for name, value in of_node.items():
                        free[name] = free.get(name, 0.0) - value

    def take(self, worker: WorkerResources, before: Holding, now: Holding) -> bool:
        """Take what ``now`` holds more than ``before``. Return whether that was free; otherwise, take nothing."""
        old = amounts(worker, before)
        more = {
            (node, name): value - old.get(node, {}).get(name, 0.0)
            for node, of_node in amounts(worker, now).items()
            for name, value in of_node.items()
        }
        if any(n > self._free.get(at, {}).get(name, 0.0) + ROUNDING for (at, name), n in more.items() if n > 0):
            return False
        for (node, name), value in more.items():
            if value > 0:
                self._free[node][name] -= value
        return True

    def left(self) -> dict[str, dict[str, float]]:
        return {node: dict(free) for node, free in self._free.items()}

    def restore(self, left: dict[str, dict[str, float]]) -> None:
        self._free = left


def _paired(one: Mapping[str, int], other: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for node in dict.fromkeys([*one, *other]):
        yield node, one.get(node, 0), other.get(node, 0)
