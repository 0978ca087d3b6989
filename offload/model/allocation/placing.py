"""The nodes of counted workers and cores: what stands keeps its place, the rest is packed on the fewest nodes.

Where it stops: a heuristic. It may move jobs to make room for others; whether that pays, :mod:`allocate` decides by what both are worth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from offload.model.allocation.choices import kind_of
from offload.model.allocation.values import Holding, Job
from offload.model.placement import NodeResources

ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a job is to get.

    Args:
        stands: whether its workers stay where they are.
        goodput: the goodput of so many workers on so many nodes.
    """

    job: Job
    kind: str
    workers: int
    cores: int
    stands: bool
    goodput: Callable[[int, int], float]


@dataclass(eq=False)
class Free:
    """What is free on each node while jobs are placed."""

    nodes: Sequence[NodeResources]
    gpus: list[float] = field(init=False)
    cpus: list[float] = field(init=False)
    others: list[dict[str, float]] = field(init=False)
    kinds: dict[tuple[object, ...], list[str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gpus = [node.gpus for node in self.nodes]
        self.cpus = [node.cpus for node in self.nodes]
        self.others = [dict(node.others) for node in self.nodes]

    def slots(self, i: int, job: Job, kind: str) -> int:
        """Workers of this job that fit on node i now."""
        worker = job.worker
        shape = (worker.cpus, worker.gpus, *worker.others.items())
        if shape not in self.kinds:
            self.kinds[shape] = [kind_of(node, job) for node in self.nodes]
        if self.kinds[shape][i] != kind:
            return 0
        most = [self.gpus[i] / worker.gpus] if worker.gpus else []
        most += [self.cpus[i] / worker.cpus] if worker.cpus else []
        most += [self.others[i].get(name, 0.0) / amount for name, amount in worker.others.items() if amount > 0]
        return int(min(most) + ROUNDING) if most else job.workers[1]

    def take(self, i: int, job: Job, workers: int) -> None:
        """Take the resources of ``workers`` workers on node i; give them back if negative."""
        self.gpus[i] -= workers * job.worker.gpus
        self.cpus[i] -= workers * job.worker.cpus
        for name, amount in job.worker.others.items():
            self.others[i][name] = self.others[i].get(name, 0.0) - workers * amount

    def cores(self, i: int) -> int:
        """Whole cores of node i that can preprocess. A core of a leased run is one CPU, so a part of one is of no use."""
        return int(min(self.cpus[i], self.nodes[i].process_room) + ROUNDING)


def place(wanted: Sequence[Wanted], nodes: Sequence[NodeResources], *, may_move: bool) -> dict[str, Holding]:
    """The holding of each job by its name: nothing for one whose least workers fit nowhere, or without a whole core that it needs.

    ``may_move``: whether jobs that stand on one node may go to another one, to make room for a job that would have to spread.
    """
    free = Free(nodes)
    number = {node.name: i for i, node in enumerate(nodes)}
    where: dict[str, dict[int, int]] = {}
    for want in wanted:
        if want.stands:
            where[want.job.name] = {number[name]: n for name, n in want.job.present.workers.items() if n}
            for i, n in where[want.job.name].items():
                free.take(i, want.job, n)
    standing = {want.job.name: want for want in wanted if want.stands}
    rest = [want for want in wanted if not want.stands]
    # The largest first: small ones fill the gaps. But whoever is more urgent finds the gaps that there are.
    for want in sorted(rest, key=_turn):
        spots = _fewest(free, want)
        if may_move and spreads(want, sum(spots.values()), len(spots), nodes):
            spots = _make_room(free, want, standing, where) or spots
        spots = _worth_it(free, want, spots)
        if sum(spots.values()) >= max(want.job.workers[0], 1):
            where[want.job.name] = spots
            for i, n in spots.items():
                free.take(i, want.job, n)
    cores = _place_cores(free, [want for want in wanted if want.job.name in where], where, number)
    while starved := [want for want in wanted if want.cores and want.job.name in where and not cores[want.job.name]]:
        # Parts of cores that are left on several nodes feed nobody. Its workers would wait for data, and hold their GPUs meanwhile.
        last = min(starved, key=lambda want: (want.job.priority, want.stands, want.job.age_s, want.job.name))
        for i, n in where.pop(last.job.name).items():
            free.take(i, last.job, -n)
        cores = _place_cores(free, [want for want in wanted if want.job.name in where], where, number)
    return {
        want.job.name: Holding(
            kind=want.kind,
            workers={nodes[i].name: n for i, n in sorted(where[want.job.name].items())},
            cores={nodes[i].name: n for i, n in sorted(cores[want.job.name].items()) if n},
        )
        if want.job.name in where
        else Holding()
        for want in wanted
    }


def _turn(want: Wanted) -> tuple[float, float, str]:
    return -want.job.priority, -want.workers * max(want.job.worker.gpus, ROUNDING), want.job.name


def _fewest(free: Free, want: Wanted, workers: int | None = None) -> dict[int, int]:
    """Workers on the fewest nodes, and of these on the fullest; fewer of them if not all fit."""
    left = want.workers if workers is None else workers
    room = {i: free.slots(i, want.job, want.kind) for i in range(len(free.nodes))}
    room = {i: n for i, n in room.items() if n > 0}
    spots: dict[int, int] = {}
    while left > 0 and room:
        fitting = [i for i, n in room.items() if n >= left]
        # The tightest node that holds all of what is left, else the one that holds the most.
        i = (
            min(fitting, key=lambda i: (room[i], free.cpus[i], i))
            if fitting
            else max(room, key=lambda i: (room[i], -i))
        )
        spots[i] = min(room.pop(i), left)
        left -= spots[i]
    return spots


def spreads(want: Wanted, workers: int, on_nodes: int, nodes: Sequence[NodeResources]) -> bool:
    """Whether these are not all workers, or span more nodes than they would on empty ones."""
    return workers < want.workers or (on_nodes > 1 and on_nodes > len(_fewest(Free(nodes), want)))


def _make_room(
    free: Free, want: Wanted, standing: dict[str, Wanted], where: dict[str, dict[int, int]]
) -> dict[int, int] | None:
    """A node for all workers, after at most a few jobs moved from it to other nodes; None if there is none."""
    by_room = sorted(range(len(free.nodes)), key=lambda i: (-free.slots(i, want.job, want.kind), i))
    for i in by_room:
        if free.slots(i, want.job, want.kind) <= 0:
            break
        movable = sorted(
            (name for name in standing if list(where[name]) == [i] and standing[name].job.preemptible),
            key=lambda name: (where[name][i], name),
        )
        moved: list[tuple[str, int, int]] = []
        for name in movable:
            if free.slots(i, want.job, want.kind) >= want.workers:
                break
            other, count = standing[name], where[name][i]
            homes = [k for k in range(len(free.nodes)) if k != i and free.slots(k, other.job, other.kind) >= count]
            if not homes or count >= want.workers:
                continue
            home = min(homes, key=lambda k: (free.slots(k, other.job, other.kind), k))
            free.take(i, other.job, -count)
            free.take(home, other.job, count)
            where[name] = {home: count}
            moved.append((name, home, count))
        if free.slots(i, want.job, want.kind) >= want.workers:
            return {i: want.workers}
        for name, home, count in reversed(moved):
            free.take(home, standing[name].job, -count)
            free.take(i, standing[name].job, count)
            where[name] = {i: count}
    return None


def _worth_it(free: Free, want: Wanted, spots: dict[int, int]) -> dict[int, int]:
    """These workers, or fewer on fewer nodes if that is faster."""
    best, least = spots, max(want.job.workers[0], 1)
    total = sum(spots.values())
    value = want.goodput(total, len(spots)) if total else 0.0
    for fewer in range(total - 1, least - 1, -1):
        if len(best) <= 1:
            break
        other = _fewest(free, want, fewer)
        if len(other) < len(best):
            goodput = want.goodput(fewer, len(other))
            if goodput > value:
                best, value = other, goodput
    return best


def _place_cores(
    free: Free, wanted: Sequence[Wanted], where: dict[str, dict[int, int]], number: dict[str, int]
) -> dict[str, dict[int, int]]:
    """Cores for each job: where it has them, first beside its workers, then others beside these, then on the emptiest nodes.

    Workers leave whole cores of a node, so that all of them may have less room than was counted. Then those with the most have fewer, to
    whom a core matters least.
    """
    room = {i: free.cores(i) for i in range(len(free.nodes))}
    counts = _fitting({want.job.name: want.cores for want in wanted}, sum(room.values()))
    cores: dict[str, dict[int, int]] = {want.job.name: {} for want in wanted}

    def give(want: Wanted, i: int, most: int) -> None:
        mine = cores[want.job.name]
        count = max(min(most, room[i], counts[want.job.name] - sum(mine.values())), 0)
        if count:
            mine[i] = mine.get(i, 0) + count
            room[i] -= count

    for want in wanted:
        homes, there = where[want.job.name], [name for name in want.job.present.cores if name in number]
        for name in sorted(there, key=lambda name: (number[name] not in homes, name)):
            give(want, number[name], want.job.present.cores[name])
    for want in wanted:
        for i, _ in sorted(where[want.job.name].items()):
            give(want, i, counts[want.job.name])
    for want in wanted:
        while sum(cores[want.job.name].values()) < counts[want.job.name]:
            left = counts[want.job.name] - sum(cores[want.job.name].values())
            fitting = [i for i, n in room.items() if n >= left]
            i = min(fitting, key=lambda i: (room[i], i)) if fitting else max(room, key=lambda i: (room[i], -i))
            if not room[i]:
                break
            give(want, i, left)
    return cores


def _fitting(counts: Mapping[str, int], room: int) -> dict[str, int]:
    """The counts, the largest lowered until all fit."""
    fitting, over = dict(counts), sum(counts.values()) - room
    largest = [(-count, name) for name, count in counts.items()]
    heapq.heapify(largest)
    for _ in range(over if largest else 0):
        count, name = heapq.heappop(largest)
        fitting[name] = max(-count - 1, 0)
        heapq.heappush(largest, (count + 1, name))
    return fitting
