"""Decide when a worker commits a checkpoint, and measure the cost. :mod:`offload.adapt.failures` has the formula."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from offload.adapt.failures import commit_interval_s
from offload.measure.steps import StepMeter
from offload.report.events.training import CheckpointWritten
from offload.train.config import Checkpoints
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.reporter import Reporter
from offload.train.worker.saving.training_state import TrainingState

LEAST_TO_GO_ON_S = 5.0  # shorter intervals wait for each commit: else most would be left out, since the one before is still being written
FIRST_COMMIT_S = 60.0  # interval until the cost of a commit is known


class Described(Protocol):
    """What a checkpoint says of the run beside the training state."""

    def current_metrics(self) -> Mapping[str, float]:
        """The metrics that describe the model as it is now."""

    def adaptation(self) -> Mapping[str, Any]:
        """What adaptation goes on with after a resume."""


class Committer:
    """The commits of one rank.

    Args:
        checkpoints: the user's settings.
        state: the training state to commit.
        described: what checkpoints say beside it.
        reporter, watchdog: receivers of every commit; only rank 0's reporter gets it.
        meter: measures the steps, to which the time of a commit does not belong.
        rank: the rank of this worker.
        failures_per_s: the rate of failures, as far as known.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: TrainingState,
        described: Described,
        reporter: Reporter,
        watchdog: Watchdog,
        meter: StepMeter,
        *,
        rank: int,
        failures_per_s: float,
    ) -> None:
        self._checkpoints, self._state, self._described = checkpoints, state, described
        self._reporter, self._watchdog, self._meter = reporter, watchdog, meter
        self._rank, self._failures_per_s = rank, failures_per_s
        self._cost_s: float | None = None
        self._due_at = state.committed_at

    def commit(self, reason: str) -> None:
        """Write a checkpoint. All ranks must call it. Training waits until it is written, except for regular commits."""
        with self._meter.outside():
            self._commit(reason)

    def _commit(self, reason: str) -> None:
        began = time.monotonic()
        # Other commits are rare, or come before an end, so training waits for them.
        later = reason == "interval" and (self._interval_s() or 0.0) >= LEAST_TO_GO_ON_S
        with self._watchdog.waiting():
            self._state.commit(self._described.current_metrics(), self._described.adaptation(), wait=not later)
        # Only the time for which training stood still counts. Commits that wait cost more, and are rare.
        if later:
            self._cost_s = self._state.committed_at - began
        if self._rank == 0 and self._state.models:  # without a model, nothing was stored
            progress = self._state.progress
            seconds = round(self._state.committed_at - began, 3)
            self._reporter.event(
                CheckpointWritten(
                    reason=reason, epoch=progress.epoch, step=progress.step, seconds=seconds, waited=not later
                )
            )

    def finish(self) -> None:
        """Commit what was trained since the last checkpoint, and wait until all are stored. All ranks must call it."""
        if self._state.uncommitted:
            self.commit("end")
        with self._watchdog.waiting():
            self._state.settle()

    def due(self) -> bool:
        """Return whether the interval has passed since the last checkpoint, or since this last returned True. Call it before each step.

        A commit is also due once one has failed: it raises the error.
        """
        if self._state.failed:
            return True
        every_s, now = self._interval_s(), time.monotonic()
        if every_s is None or self._state.storing or now - max(self._due_at, self._state.committed_at) < every_s:
            return False
        # Due once: the ranks hear of it with a later batch, and would otherwise hear it again with each batch in
        # between.
        self._due_at = now
        return True

    def _interval_s(self) -> float | None:
        if self._checkpoints.every_s != "auto":
            return self._checkpoints.every_s
        return FIRST_COMMIT_S if self._cost_s is None else commit_interval_s(self._cost_s, self._failures_per_s)
