"""The configuration of a Trainer: frozen, keyword-only, checked where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from offload.adapt.rules import RULES, Rule
from offload.adapt.situation import Objective
from offload.errors import ConfigError, argument
from offload.model.batch_split import BatchSplit
from offload.model.checks import (
    MOST,
    check_choice,
    check_count,
    check_flag,
    check_mapping,
    check_number,
    check_range,
    check_text,
)

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """Batch sizes, in samples.

    Args:
        initial: the initial global batch M.
        max: the largest global batch that adaptation may choose.
        local: the smallest and largest local batch m of one worker. A worker accumulates a larger share.

    Raises:
        ConfigError: for sizes that are not whole numbers of at least 1, or that contradict each other.
    """

    initial: int
    max: int | None = None
    local: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        initial = check_count("BatchSize: initial", self.initial, least=1, sane="such as initial=64")
        _set(self, initial=initial)
        if self.max is not None:
            sane = f"the largest global batch; initial is {initial}"
            _set(self, max=check_count("BatchSize: max", self.max, least=initial, sane=sane))
        if self.local is not None:
            _set(self, local=check_range("BatchSize: local", self.local, sane="such as local=(1, 256)"))
        if self.local is not None and self.initial < self.local[0]:
            raise ConfigError(
                f"the initial batch size {self.initial} is below the smallest local batch of one worker, {self.local[0]}: pass "
                f"initial={self.local[0]} or more, or local=({self.initial}, {self.local[1]})."
            )

    @property
    def adaptive(self) -> bool:
        """Whether there is a range to choose from."""
        return self.max is not None and self.max > self.initial

    def split(self, workers: int, global_batch_size: int | None = None) -> BatchSplit:
        """Split a global batch, by default the initial one, over ``workers`` workers: ``M = K·m·(s + 1)``, rounded up to whole
        local batches. K: the workers, m: the local batch, s: the accumulation steps."""
        return BatchSplit.of(
            global_batch_size or self.initial, workers, self.local[1] if self.local is not None else None
        )

    def carried_over(self, before: BatchSplit, workers: int) -> BatchSplit:
        """Split the last trained batch, limited to these sizes, over ``workers`` workers. Without adaptive batches, split the initial one.
        A resumed run may have other limits than the run before."""
        if not self.adaptive:
            return self.split(workers)
        size = min(max(before.global_batch_size, self.initial), self.max or self.initial)
        # A split that exceeds the limit only by rounding up to whole local batches stays: a new split could differ from it.
        rounded_up = 0 <= before.global_batch_size - size < before.workers * (before.accum_steps + 1)
        split = before if rounded_up and workers == before.workers else self.split(workers, size)
        return split.with_local_at_most(None if self.local is None else self.local[1])


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The schedule of checkpoints, and how many to keep.

    A run always commits at the end of an epoch (every ``every_epochs``), at the end of the run, and on Ctrl-C. Training goes on while
    a checkpoint is being written.

    Args:
        every_epochs: epochs between two commits at the end of an epoch.
        every_s: adds a commit, between two global batches, once this many seconds have passed since the last. ``"auto"`` derives the
            interval from the cost of a commit and the rate of node failures, so that commits take at most 1 % of the time.
        keep: the number of checkpoints to keep: the newest; with ``best``, the best and the newest.
        best: the name of a reported metric. A checkpoint has the value that the function reported since the last step, or with it.
            Without one, as between two validations, it counts as the worst.
        mode: whether the best metric is the largest or the smallest.

    Raises:
        ConfigError: for invalid values.
    """

    every_epochs: int = 1
    every_s: float | Literal["auto"] | None = "auto"
    keep: int = 2
    best: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        every_epochs = check_count("Checkpoints: every_epochs", self.every_epochs, least=1, sane="such as 1")
        keep = check_count("Checkpoints: keep", self.keep, least=1, sane="such as 2")
        _set(self, every_epochs=every_epochs, keep=keep)
        if self.every_s is not None and not (isinstance(self.every_s, str) and self.every_s == "auto"):
            sane = 'seconds, "auto", or None for no commits between epochs'
            _set(self, every_s=check_number("Checkpoints: every_s", self.every_s, sane=sane))
        if self.best is not None:
            check_text("Checkpoints: best", self.best, sane='the name of a reported metric, such as "accuracy"')
        check_choice("Checkpoints: mode", self.mode, ("max", "min"))


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The adaptation of a running training with a range of batch sizes or workers.

    Args:
        learning_rate: the rule by which learning rates follow the batch: ``"adascale"``, ``"adascale-sqrt"`` (its square root),
            ``"linear"``, ``"sqrt"``, ``"legw"`` or ``"none"``. ``"auto"``: adascale-sqrt for optimizers of the Adam family,
            adascale for others.
        warmup_epochs: warm-up epochs of LEGW at the initial batch.
        interval_s: seconds between two decisions.
        schedule: worker counts instead of decisions, by the epoch at which they begin (``{0: 2, 30: 4}``) or by the completed share
            of the training (``{0.0: 2, 0.5: 4}``). Training waits there until the workers have changed.
        objective: ``"time"``: the most progress per second; ``"cost"``: the most per dollar. With ``"cost"``, idle worker nodes are
            not charged to the objective, since they can be released.

    Raises:
        ConfigError: for invalid values, or a schedule that mixes epochs and shares of the training.
    """

    learning_rate: Rule | Literal["auto"] = "auto"
    warmup_epochs: float = 0.0
    interval_s: float = 30.0
    schedule: Mapping[int, int] | Mapping[float, int] | None = None
    objective: Objective = "time"

    def __post_init__(self) -> None:
        check_choice("Adaptation: learning_rate", self.learning_rate, ("auto", *RULES))
        check_choice("Adaptation: objective", self.objective, ("time", "cost"))
        _set(
            self,
            warmup_epochs=check_number("Adaptation: warmup_epochs", self.warmup_epochs, sane="such as 5"),
            interval_s=check_number("Adaptation: interval_s", self.interval_s, above=0.0, sane="seconds, such as 30"),
        )
        if self.schedule is not None:
            _set(self, schedule=_schedule(self.schedule))
        if self.by_progress and any(isinstance(at, int) and at > 0 for at in self.schedule or {}):
            raise ConfigError(
                f"schedule has epochs and shares of the training: {dict(self.schedule or {})}. Pass one or the other."
            )

    @property
    def by_progress(self) -> bool:
        """Whether the schedule uses shares of the training, not epochs."""
        return any(isinstance(at, float) for at in self.schedule or {})

    def scheduled(self, epoch: int, progress: float) -> int | None:
        """The scheduled worker count in this epoch, at this share of the training; None without a schedule."""
        entries = sorted((self.schedule or {}).items())
        begun = self.entries_begun(epoch, progress)
        return entries[begun - 1][1] if begun else None

    def entries_begun(self, epoch: int, progress: float) -> int:
        """The number of entries of the schedule that have begun in this epoch, at this share of the training. The last one applies."""
        return sum(at <= (progress if self.by_progress else epoch) for at in self.schedule or {})


MOST_PRIORITY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The capacity that a run may request from its cluster, and its use of the nodes.

    Args:
        preprocessing_cores: the least and the most cores, on a cluster that adds nodes on request and removes idle ones (Ray's
            autoscaler). The driver asks for as many cores as keep the accelerators busy, and releases whole nodes that it does not
            need. None: every core of the cluster preprocesses, and the driver asks for none.
        autoscale_workers: whether the driver also asks for worker nodes. Worker counts that do not fit yet then count as possible, and
            idle worker nodes are released. At the start, the driver waits for the least number.
        nodes_deadline_s: how long the driver waits for nodes at the start.
        mixed_gpus: whether workers may train on several kinds of GPU at once. Otherwise, all workers train on the kind that holds the
            most of them, and nodes with other GPUs preprocess.
        usd_per_hour: prices of instance types, instead of the catalog's. Nodes carry their type in the label ``instance-type`` (``ray
            start --labels instance-type=ml.g5.xlarge``).
        arbiter: whether the arbiter of the cluster (``offload arbiter start``) chooses the run's workers and cores, together with those
            of all other runs.
        weight: the run's share beside others: two runs with weights 2 and 1 share in about this ratio. Only with an arbiter.
        priority: runs of higher priority have their least workers before others have any. Only with an arbiter.
        preemptible: whether the arbiter may take workers from the run once it has them. Only with an arbiter.

    Raises:
        ConfigError: for invalid values.
    """

    preprocessing_cores: tuple[int, int] | None = None
    autoscale_workers: bool = False
    nodes_deadline_s: float = 900.0
    mixed_gpus: bool = False
    usd_per_hour: Mapping[str, float] | None = None
    arbiter: bool = False
    weight: float = 1.0
    priority: int = 0
    preemptible: bool = True

    def __post_init__(self) -> None:
        _set(
            self,
            priority=check_count(
                "Cluster: priority", self.priority, least=-MOST_PRIORITY, most=MOST_PRIORITY, sane="such as 1"
            ),
            arbiter=check_flag("Cluster: arbiter", self.arbiter),
            weight=check_number("Cluster: weight", self.weight, above=0.0, sane="a share, such as 2"),
            preemptible=check_flag("Cluster: preemptible", self.preemptible),
            nodes_deadline_s=check_number(
                "Cluster: nodes_deadline_s", self.nodes_deadline_s, above=0.0, sane="seconds, such as 900"
            ),
            autoscale_workers=check_flag("Cluster: autoscale_workers", self.autoscale_workers),
            mixed_gpus=check_flag("Cluster: mixed_gpus", self.mixed_gpus),
        )
        if self.preprocessing_cores is not None:
            cores = check_range("Cluster: preprocessing_cores", self.preprocessing_cores, sane="such as (4, 64)")
            _set(self, preprocessing_cores=cores)
        if self.usd_per_hour is not None:
            _set(self, usd_per_hour=_prices(self.usd_per_hour))


def _prices(usd_per_hour: Any) -> dict[str, float]:
    sane = "dollars by instance type, such as {'ml.g5.xlarge': 1.4}"
    prices = check_mapping("Cluster: usd_per_hour", usd_per_hour, sane=sane)
    return {
        check_text("Cluster: the keys of usd_per_hour", name, sane=sane): check_number(
            f"Cluster: usd_per_hour[{name!r}]", usd, above=0.0, sane="dollars, such as 1.4"
        )
        for name, usd in prices.items()
    }


def _schedule(entries: Any) -> dict[int, int] | dict[float, int]:
    """Worker counts by epoch (ints) or by share of the training (floats)."""
    sane = "epochs, such as {0: 2, 30: 4}, or shares of the training, such as {0.0: 2, 0.5: 4}"
    schedule: dict[Any, int] = {}
    for at, workers in check_mapping("Adaptation: schedule", entries, sane=sane).items():
        name = "Adaptation: the keys of schedule"
        if isinstance(at, float | np.floating):
            key: float = check_number(name, at, most=1.0, sane=sane)
        else:
            key = check_count(name, at, sane=sane)
        schedule[key] = check_count(f"Adaptation: schedule[{key}]", workers, least=1, sane="a number of workers")
    return schedule


def workers_range(workers: Any) -> tuple[int, int]:
    """``workers=4`` or ``workers=(1, 8)`` as (least, most)."""
    sane = "such as workers=4 or workers=(1, 8)"
    if isinstance(workers, tuple | list):
        return check_range("workers", workers, sane=sane)
    count = check_count("workers", workers, least=1, sane=sane)
    return count, count


def _set(config: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass within its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


@dataclass(frozen=True, kw_only=True)
class WorkerOverrides:
    """Settings of the workers that replace the script's, such as those of the command line; None keeps the script's setting.

    Args:
        max_workers: the most workers.
        cpus_per_worker, gpus_per_worker: CPUs and GPUs that each worker reserves.

    Raises:
        ConfigError: for numbers that Ray does not accept.
    """

    max_workers: int | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None

    def __post_init__(self) -> None:
        if self.max_workers is not None:
            _set(self, max_workers=check_count(argument("max_workers"), self.max_workers, least=1, sane="such as 4"))
        if self.cpus_per_worker is not None:
            _set(
                self,
                cpus_per_worker=check_number(
                    argument("cpus_per_worker"), self.cpus_per_worker, most=MOST, sane="such as 2"
                ),
            )
        if self.gpus_per_worker is not None:
            sane = "a whole number, or a share of one GPU such as 0.5"
            gpus = check_number(argument("gpus_per_worker"), self.gpus_per_worker, most=MOST, sane=sane)
            if gpus >= 1 and gpus != int(gpus):
                raise ConfigError(f"{argument('gpus_per_worker')} must be {sane}, found {gpus:g}.")
            _set(self, gpus_per_worker=gpus)

    def bounds(self, workers: tuple[int, int] | None) -> tuple[int, int] | None:
        """The (least, most) workers instead of the script's. The least number stays if it is not above ``max_workers``; if the script
        has no range, it is 1."""
        if self.max_workers is None:
            return workers
        return min(workers[0] if workers is not None else 1, self.max_workers), self.max_workers
