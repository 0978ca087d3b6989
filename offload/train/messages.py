"""The messages between the processes of a run: the driver, the run's actor and the workers.

It imports neither torch nor Ray: the run's actor starts beside the workers and must start fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.report.events import RunEvent

TRAIN = "train"
"""The name of the training data set."""


End = Literal["", "resize", "stop"]
"""The end of a worker group: none, to make way for another group, or for good."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The driver's orders. Its state machine makes all of them (:func:`offload.train.driver.fleet.state.orders_of`); the hub
    passes them on, and nobody changes them.

    Args:
        serial: a number that rises with every change. The hub ignores orders that arrive after newer ones.
        workers: the size of the next worker group; 0: no group may start at present.
        avoid: ids of nodes on which no worker may start.
        homes: the id of each worker's node, where somebody outside the run has chosen them; empty: Ray chooses.
        ends_group: the last worker group (its attempt) that must make way for another.
        without_commit: whether that group ends without a commit, since it can no longer commit.
        stop: whether training ends for good.
        split: the split of global batches; None: no change. A group of another size carries it over.
        learned: the knowledge of adaptation. Checkpoints keep it.
        entries_followed: the number of entries of the worker schedule that the driver has followed, as far as it can.
        failures_seen: the number of worker failures after which the driver has looked at the cluster.
    """

    serial: int = 0
    workers: int = 0
    avoid: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    ends_group: int = 0
    without_commit: bool = False
    stop: bool = False
    split: BatchSplit | None = None
    learned: dict[str, Any] | None = None
    entries_followed: int = 0
    failures_seen: int = 0

    def end_of(self, attempt: int) -> End:
        """How the worker group of this attempt must end."""
        if self.stop:
            return "stop"
        return "resize" if attempt <= self.ends_group else ""


@dataclass(frozen=True, kw_only=True)
class GroupStart:
    """The hub's answer to a worker group that starts.

    Args:
        attempt: the number of the group, from 1.
        orders: the newest orders.
        failures_per_s: the estimated rate of this run's interruptions.
        most_local: the largest local batch that may fit into the devices' memory; None: no known bound.
    """

    attempt: int
    orders: Orders
    failures_per_s: float
    most_local: int | None


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """The progress of a worker group, as its rank 0 reports it.

    Args:
        workers: the number of workers that train; 0 before the first report.
        split: the split of the newest step's global batch.
        changes: the number of changes of ``split`` since the group started. Totals across a change describe no single batch.
        useful: progress in samples as useful as those of initial batches.
        noise: ``(sqr, var, sqr_error)`` of all parameters at the initial batch; None before the first estimate.
        goal: the value of ``useful`` at the end of training; None if unknown.
        learned: :attr:`Orders.learned` from the checkpoint from which training resumed.
        most_local: the largest local batch that fits into the device's memory, as far as known.
    """

    workers: int = 0
    split: BatchSplit | None = None
    changes: int = 0
    useful: float = 0.0
    noise: tuple[float, float, float] | None = None
    goal: float | None = None
    learned: dict[str, Any] | None = None
    most_local: int | None = None


@dataclass(frozen=True, kw_only=True)
class Push:
    """The report of one rank: its node, its totals since it started, the progress of the run (steps and samples of all ranks), and
    events since its last push."""

    rank: int
    totals: Totals
    epoch: int
    step: int
    samples: int
    node: str = ""
    group: GroupStatus = field(default_factory=GroupStatus)
    metrics: dict[str, float] = field(default_factory=dict)
    events: tuple[RunEvent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class News:
    """The hub's news for the driver.

    Args:
        cursor: the start of the next read of ``events``.
        totals: each rank's newest totals, of the running worker group.
        epoch, step, samples, metrics: the progress of training.
        events: all events since the cursor of this read.
        past: the earlier groups: their numbers of workers, and the totals of all ranks.
        group: the last report of rank 0.
        attempts: the number of worker groups started so far.
        rates: the measured rates of each data set's preprocessing.
        cores: the number of cores that should preprocess, and the number of those without a process yet.
        let_go: the number of the newest change of cores after which nobody holds a surplus one any more.
        running: whether a group trains.
        failures: the number of failures of worker groups so far.
        suspects: nodes of the workers that died last.
        most_local: see :class:`GroupStart`.
        failing: nodes on which workers failed repeatedly.
        worker_nodes: nodes that hold workers.
        speeds: the relative speed of each node's cores, by data set.
        process_bytes: the largest memory measured in a preprocessing process.
        spent: by node, the number of its cores that should preprocess, and the CPU seconds of its finished tasks.
    """

    cursor: int
    totals: dict[int, Totals]
    epoch: int
    step: int
    samples: int
    metrics: dict[str, float]
    events: tuple[RunEvent, ...]
    past: tuple[tuple[int, Totals], ...] = ()
    group: GroupStatus = field(default_factory=GroupStatus)
    attempts: int = 0
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    cores: tuple[int, int] = (0, 0)
    let_go: int = 0
    running: bool = False
    failures: int = 0
    suspects: tuple[str, ...] = ()
    most_local: int | None = None
    failing: tuple[str, ...] = ()
    worker_nodes: tuple[str, ...] = ()
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    process_bytes: int = 0
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)


def sum_of(totals: Mapping[int, Totals]) -> Totals:
    """Add up the totals of all ranks."""
    together = Totals()
    for of_rank in totals.values():
        together = together.plus(of_rank)
    return together
