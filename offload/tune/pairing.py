"""Which checkpoint belongs to which report of a run. Pure.

A training function reports, and then the run commits the same step at the end of the epoch. So a report waits until it is known whether a
checkpoint of its step follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.train.callback import Checkpoint, Metrics


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One report of the training function.

    Args:
        values: the metrics by name.
        epoch, step: the place of the report in the training.
        stored: whether the run has stored a checkpoint of this step.
    """

    values: Mapping[str, float]
    epoch: int
    step: int
    stored: bool


class Pairing:
    """The reports of one run, in their order, each once."""

    def __init__(self) -> None:
        self._waiting: Metrics | None = None
        self._stored_step = -1

    @property
    def waits(self) -> bool:
        """Whether a report waits for a checkpoint of its step."""
        return self._waiting is not None

    def metrics(self, metrics: Metrics) -> list[Reported]:
        """Add a report; return those that wait no longer."""
        ready = self.flush()
        self._waiting = metrics
        return ready + (self.flush() if metrics.step == self._stored_step else [])

    def checkpoint(self, checkpoint: Checkpoint) -> list[Reported]:
        """Note a checkpoint; return the reports that wait no longer."""
        if checkpoint.waited:  # another one may not be whole yet
            self._stored_step = checkpoint.step
        if self._waiting is not None and self._waiting.step == self._stored_step:
            return self.flush()
        return self.reached(checkpoint.step)

    def reached(self, step: int) -> list[Reported]:
        """Note that training has reached this step; return the reports that wait no longer."""
        return self.flush() if self._waiting is not None and step > self._waiting.step else []

    def flush(self) -> list[Reported]:
        """Return the report that waits, if there is one."""
        metrics, self._waiting = self._waiting, None
        if metrics is None:
            return []
        stored = metrics.step == self._stored_step
        return [Reported(values=metrics.values, epoch=metrics.epoch, step=metrics.step, stored=stored)]
