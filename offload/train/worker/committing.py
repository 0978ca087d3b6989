"""Decide when a worker commits a checkpoint, and measure the cost. :mod:`offload.adapt.commits` has the formula."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from offload.adapt.commits import commit_interval_s
from offload.report.events import CheckpointWritten
from offload.train.checkpoints.ray_list import with_score
from offload.train.config import Checkpoints
from offload.train.worker.reporter import Reporter
from offload.train.worker.state import TrainingState
from offload.train.worker.watchdog import Watchdog

LEAST_TO_GO_ON_S = 5.0  # least interval of commits without waiting: Ray Train accepts one every 2 s
FIRST_COMMIT_S = 60.0  # interval until the cost of a commit is known


class Committer:
    """The commits of one rank.

    Args:
        checkpoints: the user's settings.
        state: the training state to commit.
        reporter, watchdog: receivers of every commit; only rank 0's reporter gets it.
        rank: the rank of this worker.
        failures_per_s: the rate of failures, as far as known.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: TrainingState,
        reporter: Reporter,
        watchdog: Watchdog,
        *,
        rank: int,
        failures_per_s: float,
    ) -> None:
        self._every_s, self._state, self._reporter, self._watchdog = checkpoints.every_s, state, reporter, watchdog
        self._checkpoints = checkpoints
        self._rank, self._failures_per_s = rank, failures_per_s
        self._cost_s: float | None = None
        self._due_at = time.monotonic()

    def commit(self, reason: str, metrics: Mapping[str, float], adapting: Mapping[str, Any]) -> None:
        """Write a checkpoint. All ranks must call it. Training waits until it is written, except for regular commits. ``metrics``: those
        that describe the model as it is now."""
        began = time.monotonic()
        later = reason == "interval" and (self._interval_s() or 0.0) >= LEAST_TO_GO_ON_S
        with self._watchdog.waiting():
            self._state.commit(with_score(metrics, self._checkpoints), adapting, wait=not later)
        if later:
            self._cost_s = self._state.committed_at - began
        if self._rank == 0 and self._state.models:  # a loop that trains nothing stores nothing
            progress = self._state.progress
            seconds = round(self._state.committed_at - began, 3)
            self._reporter.event(
                CheckpointWritten(
                    reason=reason, epoch=progress.epoch, step=progress.step, seconds=seconds, waited=not later
                )
            )

    def due(self) -> bool:
        """Whether the interval has passed since the last checkpoint, or since this last returned True. Call it before each step."""
        every_s, now = self._interval_s(), time.monotonic()
        if every_s is None or self._state.storing or now - max(self._due_at, self._state.committed_at) < every_s:
            return False
        self._due_at = now
        return True

    def _interval_s(self) -> float | None:
        if self._every_s != "auto":
            return self._every_s
        return FIRST_COMMIT_S if self._cost_s is None else commit_interval_s(self._cost_s, self._failures_per_s)
