"""What travels between the processes of a run: the driver, the run's actor and the workers.

Imports neither torch nor Ray: the run's actor starts beside the workers and must start fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit

TRAIN = "train"
"""The name of the data set that is trained on."""


End = Literal["", "resize", "stop"]
"""How a worker group ends: not at all, to make way for another group, or for good."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the run wants. The driver's state machine makes all orders (:func:`offload.train.driver.fleet.state.orders_of`); the hub
    passes them on, and nobody changes them.

    Args:
        serial: rises with every change. The hub ignores orders that arrive behind newer ones.
        workers: of the next worker group; 0: no group may start at present.
        avoid: ids of nodes on which no worker may start.
        ends_group: the last worker group (its attempt) that must make way for another.
        without_commit: whether that group is ended as it is: it could not commit any more.
        stop: whether training ends for good.
        split: how global batches are cut; None: as they are. A group of another size carries it over.
        learned: what adaptation has learned. Checkpoints keep it.
        entries_followed: the entries of the schedule of worker counts up to which the driver has done what it can.
        failures_seen: the worker failures after which the driver has looked at the cluster.
    """

    serial: int = 0
    workers: int = 0
    avoid: tuple[str, ...] = ()
    ends_group: int = 0
    without_commit: bool = False
    stop: bool = False
    split: BatchSplit | None = None
    learned: dict[str, Any] | None = None
    entries_followed: int = 0
    failures_seen: int = 0

    def end_of(self, attempt: int) -> End:
        """How the worker group of this attempt is to end."""
        if self.stop:
            return "stop"
        return "resize" if attempt <= self.ends_group else ""


@dataclass(frozen=True, kw_only=True)
class GroupStart:
    """What a worker group learns from the hub when it starts.

    Args:
        attempt: its number, from 1.
        orders: the newest.
        failures_per_s: how often this run is interrupted, as far as is known.
        most_local: the largest local batch that the devices' memory may hold; None: no bound is known.
    """

    attempt: int
    orders: Orders
    failures_per_s: float
    most_local: int | None


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """How far a worker group is, as its rank 0 reports it.

    Args:
        workers: that train; 0 before the first report.
        split: of the newest step's global batch.
        changes: how often that changed since the group started: totals between two of them belong to no one batch.
        useful: progress in samples as useful as those of initial batches.
        noise: ``(sqr, var)`` of all parameters at the initial batch; None before the first estimate.
        goal: of ``useful``; None if it is not known.
        learned: :attr:`Orders.learned` as the checkpoint held it from which training resumed.
        most_local: the largest local batch that fits into the device's memory, as far as that is known.
    """

    workers: int = 0
    split: BatchSplit | None = None
    changes: int = 0
    useful: float = 0.0
    noise: tuple[float, float] | None = None
    goal: float | None = None
    learned: dict[str, Any] | None = None
    most_local: int | None = None


@dataclass(frozen=True, kw_only=True)
class Push:
    """What one rank reports: where it runs, its totals since it started, how far the run is (steps and samples of all ranks), and
    events since its last push."""

    rank: int
    totals: Totals
    epoch: int
    step: int
    samples: int
    node: str = ""
    group: GroupStatus = field(default_factory=GroupStatus)
    metrics: dict[str, float] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class News:
    """What the driver reads from the hub.

    Args:
        cursor: where the next read of ``events`` begins.
        totals: each rank's newest, of the worker group that runs.
        epoch, step, samples, metrics: how far training is.
        events: all since the cursor that was read with.
        past: the groups before: their number of workers, and all ranks' totals.
        group: the last report of rank 0.
        attempts: worker groups started so far.
        rates: what each data set's preprocessing was measured at.
        cores: how many cores are to preprocess, and how many of them have no process yet.
        running: whether a group trains.
        failures: of worker groups so far.
        suspects: nodes of the workers that died last.
        most_local: see :class:`GroupStart`.
        failing: nodes on which workers failed repeatedly.
        worker_nodes: nodes that hold workers.
        speeds: how fast each node's cores are, by data set.
        process_bytes: the most memory that a preprocessing process was seen to hold.
    """

    cursor: int
    totals: dict[int, Totals]
    epoch: int
    step: int
    samples: int
    metrics: dict[str, float]
    events: tuple[dict[str, Any], ...]
    past: tuple[tuple[int, Totals], ...] = ()
    group: GroupStatus = field(default_factory=GroupStatus)
    attempts: int = 0
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    cores: tuple[int, int] = (0, 0)
    running: bool = False
    failures: int = 0
    suspects: tuple[str, ...] = ()
    most_local: int | None = None
    failing: tuple[str, ...] = ()
    worker_nodes: tuple[str, ...] = ()
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    process_bytes: int = 0


def sum_of(totals: Mapping[int, Totals]) -> Totals:
    """Add up the totals of all ranks."""
    together = Totals()
    for each in totals.values():
        together = together.plus(each)
    return together
