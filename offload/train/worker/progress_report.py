"""What a worker reports of its training: the group's progress, the split of batches, the user's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.model.batch_split import BatchSplit
from offload.report.events.decisions import Rebatched
from offload.report.events.event import RunEvent
from offload.report.events.training import FirstStep, MetricsReported, WorkersResumed
from offload.train.messages import GroupStatus
from offload.train.worker.links.reporter import Reporter
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.steps.batch_scaling import BatchScaling
from offload.train.worker.steps.device_memory import DeviceMemory


class ProgressReport:
    """One rank's report. Events of the whole group come from rank 0.

    Args:
        reporter: sends the report to the hub.
        state: the training state.
        scaling: the measured gradient noise; None if batches are fixed.
        memory: the memory of the device.
        rank, workers: this rank, and the number of ranks.
        split: the split of the first global batch.

    Attributes:
        split: the split of the newest step's global batch.
    """

    def __init__(
        self,
        reporter: Reporter,
        state: TrainingState,
        scaling: BatchScaling | None,
        memory: DeviceMemory,
        *,
        rank: int,
        workers: int,
        split: BatchSplit,
    ) -> None:
        self.split = split
        self._reporter, self._state, self._scaling, self._memory = reporter, state, scaling, memory
        self._rank, self._workers = rank, workers
        self._split_changes = 0
        self._has_stepped = False
        self._metrics: dict[str, float] = {}
        self._metric_steps: dict[str, int] = {}  # the step that each metric describes

    def event(self, event: RunEvent) -> None:
        """Report an event that concerns all ranks."""
        if self._rank == 0:
            self._reporter.event(event)

    def tell(self, goal: float | None) -> None:
        """Put the progress into the next push. ``goal``: the progress at which training ends, in samples; None if unknown."""
        progress = self._state.progress
        self._reporter.step, self._reporter.samples = progress.step, progress.samples
        noise = None if self._scaling is None else self._scaling.noise.whole
        self._reporter.group = GroupStatus(
            workers=self._workers,
            split=self.split,
            changes=self._split_changes,
            useful=progress.useful,
            noise=None if noise is None else (noise.sqr, noise.var, noise.sqr_error),
            goal=goal,
            learned=self._state.adapting.get("learned"),
            most_local=self._memory.most_local,
        )

    def resumed(self, attempt: int, goal: float | None) -> None:
        """Report that this worker group, of that number, goes on from a checkpoint. ``goal``: as in :meth:`tell`."""
        self.tell(goal)
        state = self._state
        self.event(
            WorkersResumed(
                attempt=attempt,
                epoch=state.progress.epoch,
                step=state.progress.step,
                trained=len(state.progress.trained),
                epoch_starts_again=state.changed,
                damaged=state.damaged,
            )
        )

    def follow(self, split: BatchSplit, epoch: int) -> None:
        """Note the split of the global batch that begins."""
        if split == self.split:
            return
        self.split = split
        self._split_changes += 1
        self.event(
            Rebatched(
                epoch=epoch,
                step=self._state.progress.step,
                local_batch_size=split.local_batch_size,
                accum_steps=split.accum_steps,
                global_batch_size=split.global_batch_size,
            )
        )

    def stepped(self) -> None:
        """Note the end of a global batch."""
        if not self._has_stepped:
            self.event(FirstStep(step=self._state.progress.step, workers=self._workers))
        self._has_stepped = True

    def metrics(self, means: Mapping[str, float], texts: Mapping[str, str], *, epoch: int, within_step: bool) -> None:
        """Report the user's metrics. ``within_step``: whether a global batch is under way, whose step they are about."""
        step = self._state.progress.step
        self._metrics.update(means)
        self._metric_steps.update(dict.fromkeys(means, step + within_step))
        self._reporter.metrics(self._metrics)
        self.event(MetricsReported(epoch=epoch, step=step, metrics=dict(means), texts=dict(texts) if texts else None))

    # -- for checkpoints -------------------------------------------------------------------------------------------

    def current_metrics(self) -> dict[str, float]:
        """The metrics that describe the model as it is now."""
        now = self._state.progress.step
        return {name: value for name, value in self._metrics.items() if self._metric_steps[name] >= now}

    def adaptation(self) -> dict[str, Any]:
        """What a resumed run goes on with, if batches adapt: the gradient noise, the split, and what the driver has learned."""
        if self._scaling is None:
            return {}
        return {
            "noise": self._scaling.to_state(),
            "workers": self._workers,
            "batch": [self.split.local_batch_size, self.split.accum_steps],
            "learned": self._reporter.orders.learned or self._state.adapting.get("learned"),
        }
