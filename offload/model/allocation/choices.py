"""What each job could hold, and what that would be worth: workers of one kind and preprocessing cores, as arrays.

Where it stops: a choice counts workers and cores; :mod:`placing` finds their nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from offload.model.allocation.values import NO_GPU, Job, Rules
from offload.model.goodput import JointGoodput
from offload.model.input_rate import BYTES_PER_GIGABIT, NETWORK_EFFICIENCY
from offload.model.noise import GradientNoise
from offload.model.overlap import Floats
from offload.model.placement import UNKNOWN_GPU, NodeResources

# Preprocessing rates that a job can choose from, relative to what its workers could take at full speed, or to what all cores could make
# if that is less. With an overlap of 8, a rate of 1 leaves 8 % of the time to waiting, and a rate of 2 nothing. 0 is the least cores:
# without them, a job would wait for many where others leave few.
CORE_LEVELS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0, 1.15, 1.4, 2.0)
COUNTS_PER_OCTAVE = 4  # of worker counts above the eighth
COLUMNS = ("workers", "nodes", "cores", "goodput", "stands", "enough")
ALONE = 64  # workers of a node that reserve neither GPUs nor CPUs


def kind_of(node: NodeResources, job: Job) -> str | None:
    """The kind of the node for this job's workers; None if the node cannot hold one."""
    if not job.worker.gpus:
        return NO_GPU if slots(node, job) else None
    return (node.gpu_type or UNKNOWN_GPU) if slots(node, job) else None


def slots(node: NodeResources, job: Job) -> int:
    """The most workers of this job that the node could hold if it were empty."""
    worker = job.worker
    if (worker.gpus or any(worker.others.values())) and not worker.trains_on(node):
        return 0
    most = [node.gpus / worker.gpus] if worker.gpus else []
    most += [node.cpus / worker.cpus] if worker.cpus else []
    most += [node.others.get(name, 0.0) / amount for name, amount in worker.others.items() if amount > 0]
    return int(min(most) + 1e-9) if most else ALONE


@dataclass(frozen=True, eq=False)
class Cluster:
    """The nodes, without what pinned jobs hold.

    Args:
        nodes: the nodes' free resources.
        sharing: the number of jobs among which they are shared.
    """

    nodes: tuple[NodeResources, ...]
    sharing: int

    @cached_property
    def gpus(self) -> dict[str, float]:
        """GPUs of each kind."""
        total: dict[str, float] = {}
        for node in self.nodes:
            if node.gpus:
                kind = node.gpu_type or UNKNOWN_GPU
                total[kind] = total.get(kind, 0.0) + node.gpus
        return total

    @cached_property
    def cpus(self) -> float:
        """All cores."""
        return sum(node.cpus for node in self.nodes)

    @cached_property
    def others(self) -> dict[str, float]:
        """Custom resources, by name."""
        total: dict[str, float] = {}
        for node in self.nodes:
            for name, amount in node.others.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    @cached_property
    def alike(self) -> list[list[NodeResources]]:
        """The nodes by what they have: those of one type need one look."""
        types: dict[tuple[object, ...], list[NodeResources]] = {}
        for node in self.nodes:
            types.setdefault((node.gpus, node.cpus, node.gpu_type, tuple(sorted(node.others.items()))), []).append(node)
        return list(types.values())

    def room(self, job: Job) -> dict[str, tuple[int, int]]:
        """For each kind of node that could hold the job's workers: the most on one node, and on all."""
        rooms: dict[str, tuple[int, int]] = {}
        for alike in self.alike:
            kind, most = kind_of(alike[0], job), slots(alike[0], job)
            if kind is not None:
                widest, total = rooms.get(kind, (0, 0))
                rooms[kind] = (max(widest, most), total + most * len(alike))
        return rooms


@dataclass(frozen=True, eq=False)
class Choices:
    """What one job could hold: arrays over its choices, of which the first is nothing.

    Args:
        kinds: the kind of its workers' nodes; None for nothing.
        workers, nodes, cores: how many of each; ``cores`` are those that preprocess.
        gpus: the GPUs that it takes of its kind.
        cpus: all cores that it takes, those of its workers included.
        others: the custom resources that each of its workers takes.
        usd_per_hour: its price.
        goodput: predicted; NaN for a job without measurements.
        worth: goodput relative to that of an equal share, less what a restart costs.
        stands: whether its workers stay where they are.
        enough: cores with which its workers never wait: more are of no use.
        fair_goodput: the goodput of an equal share.
    """

    kinds: tuple[str | None, ...]
    workers: Floats
    nodes: Floats
    cores: Floats
    gpus: Floats
    cpus: Floats
    others: Mapping[str, float]
    usd_per_hour: Floats
    goodput: Floats
    worth: Floats
    stands: Floats
    enough: Floats
    fair_goodput: float


def choices_of(job: Job, cluster: Cluster, rules: Rules) -> Choices:
    """All choices of one job that its bounds and the cluster allow, without those that another one beats in everything."""
    rooms = cluster.room(job)
    if not job.measured:
        return _first_choices(job, cluster, rooms, rules)
    fair = _fair_goodput(job, cluster, rooms, rules)
    rows: list[tuple[str | None, Floats]] = []
    for kind in sorted(rooms):
        if kind in job.step_times:
            table = _table(job, kind, rooms[kind], cluster, rules)
            rows.append((kind, table[_undominated(table)]))
    kinds = tuple(kind for kind, table in rows for _ in range(len(table)))
    table = np.concatenate([np.zeros((0, len(COLUMNS))), *(table for _, table in rows)])
    return _priced(job, kinds, table, fair, rules)


def _priced(job: Job, kinds: tuple[str | None, ...], table: Floats, fair: float, rules: Rules) -> Choices:
    """Choices from rows of ``COLUMNS``, with nothing before them."""
    whole = np.concatenate([np.zeros((1, len(COLUMNS))), table])
    workers, nodes, cores, goodput, stands, enough = whole.T
    with np.errstate(invalid="ignore", divide="ignore"):
        # Before it is measured, as if cores were its limit: several newcomers then share the few that there are.
        first = workers / max(job.workers[0], 1) * np.where(enough > 0, cores / enough, 1.0)
        worth = np.where(np.isnan(goodput), first, goodput / max(fair, 1e-300))
    restarts = (stands == 0) & (workers > 0) & bool(job.present.workers)
    worth = np.where(restarts, worth * restart_factor(job, goodput), worth)
    gpus = workers * job.worker.gpus
    cpus = cores + workers * job.worker.cpus
    price = np.array([0.0, *(rules.usd_per_gpu_hour.get(kind or "", 0.0) for kind in kinds)])
    usd = gpus * price + cpus * rules.usd_per_core_hour
    others = job.worker.others
    return Choices((None, *kinds), workers, nodes, cores, gpus, cpus, others, usd, goodput, worth, stands, enough, fair)


def restart_factor(job: Job, goodput: Floats) -> Floats:
    """The share of its goodput that a job keeps if it restarts for it.

    ``(age − restarts·delay)/(age + delay)``: the share of its time that it trained and would have trained with one restart more (Qiao et
    al., "Pollux", OSDI'21, section 4.2). A job whose end is in sight trains for ``work_left/goodput`` more, so it keeps at most
    ``left/(left + delay)``.
    """
    delay = job.restart_s
    if not delay:
        return np.ones_like(goodput)
    factor = np.full_like(goodput, max(job.age_s - job.restarts * delay, 0.0) / (job.age_s + delay))
    if job.work_left is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.where(goodput > 0, job.work_left / goodput, np.inf)
            factor = np.minimum(factor, np.where(np.isfinite(left), left / (left + delay), 1.0))
    return factor


def hastened(jobs: Sequence[Job], tables: Sequence[Choices], exponent: float) -> list[Job]:
    """The jobs with weights by which those that end sooner go first (:attr:`~offload.model.allocation.values.Rules.shorter_first`).

    The mean completion time is least if jobs share in an order of their work that is left, where more workers bring less and less (Berg,
    Vesilo and Harchol-Balter, "heSRPT", 2020). Powers of the time are near that, and never leave a long job with nothing. A job of unknown
    work counts as the median.
    """
    left_s = [
        max(job.work_left / table.fair_goodput, job.restart_s, 1.0)
        if job.work_left is not None and table.fair_goodput
        else math.nan
        for job, table in zip(jobs, tables, strict=True)
    ]
    if not exponent or np.all(np.isnan(left_s)):
        return list(jobs)
    median = math.exp(float(np.nanmedian(np.log(left_s))))
    return [
        job if math.isnan(seconds) else replace(job, weight=job.weight * (median / seconds) ** exponent)
        for job, seconds in zip(jobs, left_s, strict=True)
    ]


def _first_choices(job: Job, cluster: Cluster, rooms: dict[str, tuple[int, int]], rules: Rules) -> Choices:
    """What a job without measurements may hold: its least workers, to be measured with, and up to ``Rules.first_cores`` for each."""
    least = max(job.workers[0], 1)
    # No more than a small cluster has, where it would otherwise wait for cores that do not exist.
    beside = int(cluster.cpus - least * job.worker.cpus + 1e-9)
    enough = int(np.clip(min(rules.first_cores * least, max(beside, 1)), *job.cores))
    rows, kinds = [], []
    for kind in sorted(rooms):
        widest, total = rooms[kind]
        stands = job.present.kind == kind and job.present.worker_count == least
        if least <= min(total, job.workers[1]):
            for cores in range(min(max(job.cores[0], 1), enough), enough + 1):
                rows.append((least, math.ceil(least / widest), cores, math.nan, float(stands), enough))
                kinds.append(kind)
    return _priced(job, tuple(kinds), np.array(rows, dtype=float).reshape(-1, len(COLUMNS)), 0.0, rules)


def _table(job: Job, kind: str, room: tuple[int, int], cluster: Cluster, rules: Rules) -> Floats:
    """Rows of ``COLUMNS`` for one kind."""
    widest, total = room
    here = job.present.worker_count if job.present.kind == kind else 0
    most = min(job.workers[1], total)
    if job.measured_workers is not None:
        most = min(most, max(int(rules.growth * job.measured_workers), job.workers[0], 1))
    counts = np.array(_counts(max(job.workers[0], 1), most, here), dtype=int)
    if not len(counts):
        return np.zeros((0, len(COLUMNS)))
    nodes = -(-counts // widest)
    stands = counts == here
    spread = sum(1 for held in job.present.workers.values() if held)
    if np.any(stands) and spread > nodes[stands][0]:
        # Where it is, it spans more nodes than it needs: to pack it costs a restart, so both are choices.
        counts, nodes = np.append(counts, here), np.append(nodes, spread)
        stands = np.append(np.zeros(len(counts) - 1, dtype=bool), [True])
    cores, goodput = _over_cores(job, kind, counts, nodes, cluster, rules)
    columns = (counts, nodes, cores, goodput, stands, cores[-1])
    shape = cores.shape
    rows = np.stack([np.broadcast_to(column, shape).ravel().astype(float) for column in columns], axis=1)
    return rows[rows[:, 3] > 0]


def _counts(least: int, most: int, here: int) -> list[int]:
    """Worker counts to choose from: all small ones, and ``COUNTS_PER_OCTAVE`` in each doubling."""
    chosen = []
    for count in range(least, most + 1):
        step = max(2 ** (count.bit_length() - 1) // COUNTS_PER_OCTAVE, 1)
        if count <= 8 or count % step == 0 or count in (least, most, here):
            chosen.append(count)
    return chosen


def goodput_model(job: Job, kind: str) -> JointGoodput:
    """The job's goodput on this kind of GPU, without an input rate."""
    noise = job.noise or GradientNoise(sqr=1.0, var=0.0, batch_size=job.batch_size)
    return JointGoodput(job.step_times[kind], noise, None, job.overlap)


def goodput_at(job: Job, kind: str | None, cores: int, workers: int, nodes: int) -> float:
    """The predicted goodput of so many workers on so many nodes; their number for a job without measurements."""
    if not job.measured or kind is None:
        return float(workers)
    rate = cores / job.core_seconds_per_sample if job.core_seconds_per_sample else math.inf
    biggest = job.max_batch_size if job.noise else None
    return _goodput_at(goodput_model(job, kind), rate, workers, nodes, biggest, job.local_sizes(kind))


@lru_cache(maxsize=8192)  # a decision asks for the same few placements again and again, and so does the next one
def _goodput_at(
    model: JointGoodput,
    rate: float,
    workers: int,
    nodes: int,
    max_batch_size: float | None,
    local_sizes: tuple[int, int] | None,
) -> float:
    value, _ = model.best_at_rates([nodes], [workers], [[rate]], max_batch_size, local_sizes)
    return float(value[0, 0])


def _over_cores(
    job: Job,
    kind: str,
    counts: Floats,
    nodes: Floats,
    cluster: Cluster,
    rules: Rules,
    levels: Sequence[float] = CORE_LEVELS,
) -> tuple[Floats, Floats]:
    """Cores and goodput, of shape (levels, counts)."""
    model = goodput_model(job, kind)
    biggest = job.max_batch_size if job.noise else None
    wire = np.full(len(counts), np.inf)
    if rules.network_gbps is not None and job.wire_bytes_per_sample:
        # As if all samples came from other nodes: where its cores will be is not decided yet.
        per_node = NETWORK_EFFICIENCY * BYTES_PER_GIGABIT * rules.network_gbps / job.wire_bytes_per_sample
        wire = nodes * per_node
    free, rate = model.best_at_rates(nodes, counts, wire[None], biggest, job.local_sizes(kind))
    if not job.core_seconds_per_sample:
        return np.full(free.shape, float(job.cores[0])), free
    most = min(job.cores[1], int(cluster.cpus))
    enough = np.minimum(rate * job.core_seconds_per_sample, most)
    cores = np.ceil(np.asarray(levels)[:, None] * enough)
    cores = np.clip(cores, max(job.cores[0], 1), max(most, 1))
    goodput, _ = model.best_at_rates(
        nodes, counts, np.minimum(cores / job.core_seconds_per_sample, wire), biggest, job.local_sizes(kind)
    )
    return cores, goodput


def _fair_goodput(job: Job, cluster: Cluster, rooms: dict[str, tuple[int, int]], rules: Rules) -> float:
    """The goodput of an equal share of the cluster, averaged over the kinds that the job was measured on by their room."""
    kinds = [kind for kind in sorted(rooms) if kind in job.step_times]
    total = sum(rooms[kind][1] for kind in kinds)
    share = max(math.ceil(total / max(cluster.sharing, 1)), 1)
    most = max(min(share, job.workers[1]), job.workers[0], 1)
    cores = max(cluster.cpus / max(cluster.sharing, 1) - most * job.worker.cpus, 1.0)
    goodput = 0.0
    for kind in kinds:
        # Fewer workers where so many do not fit its batch.
        counts = np.array(_counts(1, most, most))
        nodes = -(-counts // rooms[kind][0])
        model = goodput_model(job, kind)
        rate = cores / job.core_seconds_per_sample if job.core_seconds_per_sample else np.inf
        value, _ = model.best_at_rates(
            nodes,
            counts,
            np.full((1, len(counts)), rate),
            job.max_batch_size if job.noise else None,
            job.local_sizes(kind),
        )
        goodput += float(np.max(value)) * rooms[kind][1] / total
    return goodput


def _undominated(table: Floats) -> NDArray[np.bool_]:
    """A mask of the rows that no other row beats with as few workers, cores and nodes. Rows that stand always stay."""
    workers, cores, goodput, stands = table[:, 0], table[:, 2], table[:, 3], table[:, 4] > 0
    order = np.lexsort((-goodput, cores, workers))
    # By workers, then cores: a row must gain over every row before it that has no more of either.
    before = np.tri(len(order), k=-1, dtype=bool)
    no_more, no_worse = cores[order] <= cores[order][:, None], goodput[order] >= goodput[order][:, None] * (1 - 1e-9)
    keep = np.empty(len(order), dtype=bool)
    keep[order] = ~np.any(before & no_more & no_worse, axis=1)
    return keep | stands
