"""``offload.Callback``, through which a program follows a run while it trains, and the documents that it receives.

Where it stops: :mod:`offload.train.driver.listeners` calls the methods, and :mod:`offload.callbacks` holds ready callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Started:
    """The beginning of a call of ``fit()``.

    Args:
        at: seconds since 1970.
        run_dir: the run directory.
        resumed: whether the run continues an earlier one in this directory.
        workers: the number of workers.
        preprocessing_cores: the cores that preprocess.
        global_batch_size, local_batch_size, accum_steps: the first split of global batches, in samples.
        nodes: the cluster's nodes, each with its ``name``, ``cpus``, ``gpus`` and ``instance_type``.
    """

    at: float
    run_dir: Path
    resumed: bool
    workers: int
    preprocessing_cores: int
    global_batch_size: int
    local_batch_size: int
    accum_steps: int
    nodes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The measurements of the steps since the last interval, about two seconds of training.

    Args:
        at: seconds since 1970.
        epoch: the epoch, from 0.
        step: the optimizer steps so far.
        samples_per_s: the throughput.
        goodput: the throughput × the statistical efficiency of the batch, in samples of initial batches per second.
        stall: the share of the step time in which workers wait for data, from 0 to 1.
        input_ceiling_samples_per_s: what the preprocessing cores could deliver; None if unknown.
        device_ceiling_samples_per_s: what the accelerators could train without any wait for data; None if unknown.
        workers: the number of workers.
        preprocessing_cores: the cores that preprocess.
        global_batch_size: in samples.
        document: the whole line of ``metrics.jsonl``.
    """

    at: float
    epoch: int
    step: int
    samples_per_s: float
    goodput: float
    stall: float
    input_ceiling_samples_per_s: float | None
    device_ceiling_samples_per_s: float | None
    workers: int
    preprocessing_cores: int
    global_batch_size: int
    document: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One call of ``ctx.report``.

    Args:
        at: seconds since 1970.
        epoch: the epoch, from 0.
        step: the optimizer steps so far.
        values: by name, the mean over the workers.
    """

    at: float
    epoch: int
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision of the run about its size.

    Args:
        at: seconds since 1970.
        kind: ``keep``, ``split`` or ``resize`` (batches, workers), ``workers_wanted`` or ``cores_wanted`` (requests for nodes).
        reason: the reason in words.
        document: the whole line of ``events.jsonl``.
    """

    at: float
    kind: str
    reason: str
    document: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint.

    Args:
        at: seconds since 1970.
        epoch: the epoch, from 0.
        step: the optimizer steps that it holds.
        reason: why the run wrote it, such as ``interval`` or ``epoch``.
        seconds: how long that took.
        waited: whether training waited until it was stored. Otherwise it may still be under way.
    """

    at: float
    epoch: int
    step: int
    reason: str
    seconds: float
    waited: bool


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a call of ``fit()``. The run directory is complete by then.

    Args:
        at: seconds since 1970.
        status: ``finished``, ``interrupted`` or ``failed``.
        error: why the run failed; None otherwise.
        summary: the content of ``summary.json``.
    """

    at: float
    status: str
    error: str | None
    summary: Mapping[str, Any]


class Callback:
    """A receiver of what happens in a run: override the methods that you need. Each does nothing by default.

    The driver calls the methods, on a thread of the callback's own, one after another and in the order of events. A slow callback delays
    neither the run nor other callbacks. At the end, the run waits at most ten seconds for callbacks that are still busy.

    An error in a method does not end the run. The run reports each callback's first error, writes an event ``callback_failed`` into
    ``events.jsonl``, and goes on calling.

    Attributes:
        ray_metrics_port: for a callback that exports Ray's metrics, the port at which a Ray that the run starts serves them on this
            machine, 0 for a free one. None: the callback exports none.
    """

    ray_metrics_port: int | None = None

    def started(self, started: Started) -> None:
        """The run starts or resumes."""

    def interval(self, interval: Interval) -> None:
        """The workers have made steps."""

    def metrics(self, metrics: Metrics) -> None:
        """The training function has called ``ctx.report``."""

    def decision(self, decision: Decision) -> None:
        """The run has decided on its batch, workers or cores."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """The workers have written a checkpoint."""

    def ended(self, ended: Ended) -> None:
        """The run has ended, successfully or not. A process that is killed does not call this."""
