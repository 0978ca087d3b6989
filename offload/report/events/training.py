"""Events of a run's progress: its sessions, first batches and steps, checkpoints, reported metrics, and what its code prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.formatting import count, duration, figure
from offload.report.events.event import NodeNames, RunEvent
from offload.report.json_values import number


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent, kind="run_started", group="run"):
    """A session of a run begins.

    Args:
        workers, preprocessing_cores: the size with which it begins.
        local_batch_size, accum_steps, global_batch_size: the first split of global batches.
        nodes: the cluster's nodes, each as the fields of ``NodeResources``.
        usd_per_hour: prices by instance type.
        datasets: the source and the number of samples (None if unknown) of each data set.
    """

    workers: int
    preprocessing_cores: int
    local_batch_size: int
    accum_steps: int
    global_batch_size: int
    nodes: Sequence[Mapping[str, Any]]
    usd_per_hour: Mapping[str, float] | None
    datasets: Mapping[str, Mapping[str, Any]] | None

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"the run {self._verb}: {count(self.workers, 'worker')}, {count(self.preprocessing_cores, 'preprocessing core')}, "
            f"{count(len(self.nodes), 'node')}, global batch {self.global_batch_size:,}"
        )

    @property
    def _verb(self) -> str:
        return "starts"


@dataclass(frozen=True, kw_only=True)
class RunResumed(RunStarted, kind="run_resumed"):
    """A later session of an interrupted run begins."""

    @property
    def _verb(self) -> str:
        return "resumes"


@dataclass(frozen=True, kw_only=True)
class RunFinished(RunEvent, kind="run_finished", group="run"):
    """A session ends. ``status``: ``finished``, ``failed`` or ``interrupted``."""

    status: str
    error: str | None
    samples: int
    steps: int

    def sentence(self, nodes: NodeNames) -> str:
        error = f": {self.error}" if self.error else ""
        return f"the run ends, {self.status}, after {self.steps:,} steps and {self.samples:,} samples{error}"


@dataclass(frozen=True, kw_only=True)
class RunPaused(RunEvent, kind="run_paused", group="run", changes=True):
    """Somebody has paused the run: its workers and preprocessing have ended."""

    def sentence(self, nodes: NodeNames) -> str:
        return "the run is paused, and holds nothing on the cluster"


@dataclass(frozen=True, kw_only=True)
class PauseEnded(RunEvent, kind="pause_ended", group="run", live=True, changes=True):
    """Somebody has resumed the paused run."""

    def sentence(self, nodes: NodeNames) -> str:
        return "the run goes on after a pause"


@dataclass(frozen=True, kw_only=True)
class WorkersResumed(RunEvent, kind="resumed", group="run"):
    """Workers begin with a checkpoint.

    Args:
        attempt: the serial number of their group.
        epoch, step: where they go on.
        trained: the epoch's samples that are done.
        epoch_starts_again: why the epoch starts again; None if it goes on.
        damaged: newer checkpoints that cannot be read, each in words.
    """

    attempt: int
    epoch: int
    step: int
    trained: int
    epoch_starts_again: str | None
    damaged: Sequence[str] = ()

    def sentence(self, nodes: NodeNames) -> str:
        return "; ".join(self.live_lines())

    def live_lines(self) -> tuple[str, ...]:
        lines = [f"resumed at epoch {self.epoch + 1}, step {self.step:,} ({self.trained:,} of its samples are done)"]
        lines += [f"resuming from an older checkpoint: {reason}" for reason in self.damaged or ()]
        if self.epoch_starts_again:
            lines.append(
                f"the order of the samples has changed since the run began ({self.epoch_starts_again}): this epoch starts again, and its "
                "trained samples are trained once more"
            )
        return tuple(lines)


@dataclass(frozen=True, kw_only=True)
class FirstBatch(RunEvent, kind="first_batch", group="run"):
    """The first batch of a pass arrived ``seconds`` after it was asked for."""

    epoch: int
    seconds: float

    def sentence(self, nodes: NodeNames) -> str:
        return f"epoch {self.epoch + 1}: the first batch came after {duration(number(self.seconds))}"


@dataclass(frozen=True, kw_only=True)
class FirstStep(RunEvent, kind="first_step", group="run"):
    """A group of workers made its first step."""

    step: int
    workers: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"step {self.step:,}: {count(self.workers, 'worker')} made the first step"


@dataclass(frozen=True, kw_only=True)
class StoppedEarly(RunEvent, kind="stopped_early", group="run"):
    """The user's code ended training before its last epoch."""

    epoch: int
    step: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"training stopped early, in epoch {self.epoch + 1} at step {self.step:,}"


@dataclass(frozen=True, kw_only=True)
class PassNotFinished(RunEvent, kind="pass_not_finished", group="run", live=True):
    """Training ended in the middle of a pass. ``untrained``: its samples that were not trained."""

    epoch: int
    untrained: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"training ended within a pass: {self.untrained:,} of its samples were not trained"

    def live_lines(self) -> tuple[str, ...]:
        return super().live_lines() if self.untrained else ()


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(RunEvent, kind="checkpoint", group="checkpoint"):
    """A checkpoint was written, in ``seconds``. ``waited``: whether training waited until it was stored."""

    reason: str
    epoch: int
    step: int
    seconds: float
    waited: bool = True

    def sentence(self, nodes: NodeNames) -> str:
        aside = "" if self.waited else ", while training went on"
        return f"step {self.step:,}: a checkpoint ({self.reason}) took {duration(number(self.seconds))}{aside}"


@dataclass(frozen=True, kw_only=True)
class MetricsReported(RunEvent, kind="report", group="report"):
    """The user's code reported metrics. ``texts``: reported values that are no numbers."""

    epoch: int
    step: int
    metrics: Mapping[str, float]
    texts: Mapping[str, str] | None = None

    def sentence(self, nodes: NodeNames) -> str:
        values = "  ".join(f"{name} {figure(number(value))}" for name, value in self.metrics.items())
        return f"epoch {self.epoch + 1}, step {self.step:,}: {values}"

    def live_lines(self) -> tuple[str, ...]:
        """The values as the line above and below spells them."""
        values = "  ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return (f"epoch {self.epoch + 1}  step {self.step:,}  {values}",)


@dataclass(frozen=True, kw_only=True)
class WorkerPrinted(RunEvent, kind="print", group="other"):
    """The training function printed lines. The run shows them, and writes them nowhere. ``stream``: ``stdout`` or ``stderr``."""

    stream: str
    text: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"worker {self.by} printed: {self.text}"


@dataclass(frozen=True, kw_only=True)
class DataPrinted(RunEvent, kind="printed", group="other"):
    """A data set or a transform printed a line. The run shows it, and writes it into ``printed.jsonl``."""

    stream: str
    text: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"preprocessing printed: {self.text}"


@dataclass(frozen=True, kw_only=True)
class SampleSkipped(RunEvent, kind="skipped", group="fault", changes=False):
    """A sample could not be read. The run writes it into ``skipped.jsonl``."""

    dataset: str
    sample_id: int
    reason: str
    epoch: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"sample {self.sample_id} of {self.dataset!r} was skipped: {self.reason}"
