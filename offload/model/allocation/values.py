"""What an allocation takes and gives: jobs with what was measured of them, the rules, and an allotment for each job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.errors import ConfigError, argument
from offload.model.checks import check_count, check_number, check_range
from offload.model.goodput import OVERLAP
from offload.model.noise import GradientNoise
from offload.model.placement import WorkerResources
from offload.model.step_time import StepTime

NO_GPU = "without GPU"
"""The kind of nodes on which jobs train whose workers reserve no GPU."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a job holds: workers and preprocessing cores by the name of their node. Without entries, nothing.

    Args:
        kind: the GPU type of its workers (``NodeResources.gpu_type``), ``UNKNOWN_GPU`` or ``NO_GPU``; None without workers.
        workers: the number of workers on each node.
        cores: the number of preprocessing cores on each node.
    """

    kind: str | None = None
    workers: Mapping[str, int] = field(default_factory=dict)
    cores: Mapping[str, int] = field(default_factory=dict)

    @property
    def worker_count(self) -> int:
        """K."""
        return sum(self.workers.values())

    @property
    def core_count(self) -> int:
        """The cores that preprocess for it, on all nodes."""
        return sum(self.cores.values())

    def same_workers(self, other: Holding) -> bool:
        """Return whether both hold the same workers, so that going from one to the other restarts nothing."""
        mine, theirs = ({name: n for name, n in held.workers.items() if n} for held in (self, other))
        return mine == theirs


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run as the allocation sees it: what was measured, what its user allows, and what it holds.

    A job without ``step_times`` was not measured yet; its first allotment is small. A job that is not ``preemptible`` keeps what it
    holds once it has workers.

    Args:
        name: unique among the jobs.
        step_times: the fitted step time on each kind of GPU that was measured.
        noise: the gradient noise at the initial batch; None: the batch stays at ``batch_size``.
        batch_size: the global batch of a job without noise.
        max_batch_size: the largest global batch; None: the initial one.
        local_batch_sizes: the least and the most samples of a worker's micro-batch, on all kinds of GPU or on each; None: no limit.
        core_seconds_per_sample: preprocessing on one core; 0: its input is never the limit, and it takes ``cores[0]`` cores.
        wire_bytes_per_sample: bytes of a sample on its way from a preprocessing core to a worker.
        overlap: delta of :class:`~offload.model.goodput.JointGoodput`.
        worker: the CPUs and GPUs that each worker reserves.
        workers: the least and the most workers.
        cores: the least and the most preprocessing cores.
        measured_workers: the most workers it ran with; it grows to at most ``Rules.growth`` times as many. None: no such limit.
        weight: its share beside others: with weights 2 and 1, two equal jobs get goodput in this ratio, as far as workers can be divided.
        priority: jobs of higher priority have their least workers before jobs of lower priority have any.
        preemptible: whether it may lose workers that it holds.
        present: what it holds now.
        age_s: seconds since it was submitted.
        restarts: how often its workers were restarted by a change of their number or place.
        restart_s: seconds of training that a restart costs.
        work_left: what is left to do, in samples of the initial batch's worth (the unit of goodput); None: unknown.

    Raises:
        ConfigError: for a value out of its range.
    """

    name: str
    step_times: Mapping[str, StepTime] = field(default_factory=dict)
    noise: GradientNoise | None = None
    batch_size: int = 1
    max_batch_size: float | None = None
    local_batch_sizes: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None
    core_seconds_per_sample: float = 0.0
    wire_bytes_per_sample: float = 0.0
    overlap: float = OVERLAP
    worker: WorkerResources = field(default_factory=lambda: WorkerResources(cpus=1.0, gpus=1.0))
    workers: tuple[int, int] = (1, 64)
    cores: tuple[int, int] = (0, 1 << 20)
    measured_workers: int | None = None
    weight: float = 1.0
    priority: int = 0
    preemptible: bool = True
    present: Holding = field(default_factory=Holding)
    age_s: float = 0.0
    restarts: int = 0
    restart_s: float = 30.0
    work_left: float | None = None

    def __post_init__(self) -> None:
        where = f"of job {self.name}"
        check_range(f"workers {where}", self.workers, least=0, sane="workers=(1, 8)")
        check_range(f"cores {where}", self.cores, least=0, sane="cores=(1, 64)")
        check_count(f"batch_size {where}", self.batch_size, least=1)
        check_count(f"restarts {where}", self.restarts)
        check_number(f"weight {where}", self.weight, above=0.0)
        check_number(f"core_seconds_per_sample {where}", self.core_seconds_per_sample)
        check_number(f"wire_bytes_per_sample {where}", self.wire_bytes_per_sample)
        check_number(f"overlap {where}", self.overlap, least=1.0, infinite=True)
        check_number(f"age_s {where}", self.age_s)
        check_number(f"restart_s {where}", self.restart_s)
        if self.work_left is not None:
            check_number(f"work_left {where}", self.work_left)

    @property
    def measured(self) -> bool:
        """Whether its goodput can be predicted."""
        return bool(self.step_times)

    def local_sizes(self, kind: str) -> tuple[int, int] | None:
        """The least and the most samples of a micro-batch on this kind of GPU; None: no limit."""
        sizes = self.local_batch_sizes
        return sizes.get(kind) if isinstance(sizes, Mapping) else sizes

    @property
    def pinned(self) -> bool:
        """Whether it keeps exactly what it holds."""
        return not self.preemptible and bool(self.present.worker_count)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the cluster's owner wants.

    Args:
        fairness: the exponent p of the power mean of speedups that the allocation maximises. 1: the sum, whoever it goes to; -1:
            as Pollux, about equal speedups; more negative: fairer. With 1, weights do not count.
        shorter_first: how much more jobs count that end sooner. With the time T that a job's work takes on an equal share of the cluster,
            and the median of all jobs' times, its weight is multiplied by ``(median/T)^shorter_first``. 0: not at all; 0.35: jobs end
            sooner on average, and long ones later.
        growth: the factor by which a job may outgrow the workers it was measured with.
        first_cores: cores for each worker of a job that was not measured yet, beside those that nobody is known to need.
        network_gbps: the network of one node; None: no limit.
        usd_per_gpu_hour: the price of one GPU of each kind, for the budget.
        usd_per_core_hour: the price of one core, for the budget.
        usd_per_hour: the most that all allotments together may cost an hour; None: no limit.
        exact_up_to: the most choices among which the counts are optimal, those not counted that a bound rules out; with more they are
            rounded from a relaxation.

    Raises:
        ConfigError: for a value out of its range.
    """

    fairness: float = -1.0
    shorter_first: float = 0.0
    growth: float = 2.0
    first_cores: int = 2
    network_gbps: float | None = None
    usd_per_gpu_hour: Mapping[str, float] = field(default_factory=dict)
    usd_per_core_hour: float = 0.0
    usd_per_hour: float | None = None
    exact_up_to: int = 6000

    def __post_init__(self) -> None:
        check_number(argument("fairness"), self.fairness, least=-20.0, most=1.0, sane="-1, as fair as Pollux")
        check_number(argument("shorter_first"), self.shorter_first, most=1.0, sane="0 for equal runs, or 0.35")
        check_number(argument("growth"), self.growth, least=1.0)
        check_count(argument("first_cores"), self.first_cores)
        check_number(argument("usd_per_core_hour"), self.usd_per_core_hour)
        for kind, price in self.usd_per_gpu_hour.items():
            check_number(f"{argument('usd_per_gpu_hour')} of {kind}", price)
        if self.usd_per_hour is not None:
            check_number(argument("usd_per_hour"), self.usd_per_hour)
        if self.network_gbps is not None:
            check_number(argument("network_gbps"), self.network_gbps, above=0.0)


@dataclass(frozen=True, kw_only=True)
class Allotment:
    """What a job is to hold, and why.

    Args:
        holding: workers and cores by node.
        goodput: the predicted goodput with them, in initial-batch-equivalent samples/s; None for a job without measurements.
        speedup: this goodput relative to that of an equal share of the cluster; None for a job without measurements.
        restarts: whether the job's workers must restart for it.
        reason: the decision in words.
    """

    holding: Holding
    goodput: float | None
    speedup: float | None
    restarts: bool
    reason: str


def check_names(names: list[str], what: str) -> None:
    """Raise ConfigError if two of ``what`` have the same name."""
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(f"two {what} are named {twice[0]}: an allotment goes by name, so give each its own.")
