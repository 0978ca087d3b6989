"""The goal of training: epochs, steps, or time."""

from __future__ import annotations

from dataclasses import dataclass

from offload.train.checkpoints.format import Progress

ROUNDING = 1e-9  # tolerance, in epochs


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of training, the first of these that is reached.

    With batches that adapt, epochs and steps count by their worth: in larger batches each sample is worth less, so an epoch is over
    once its samples are worth an epoch of initial batches, and ``steps`` once they are worth so many initial batches.

    Args:
        epochs: the number of epochs.
        steps: the number of optimizer steps.
        seconds: the seconds of training, including those before a restart.
    """

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def by_epochs(self) -> bool:
        """Whether training ends with an epoch, unless batches adapt."""
        return self.epochs is not None

    def useful(self, *, samples: int | None, initial: int) -> float | None:
        """The worth of the samples at the goal, in samples of initial batches; None if unknown. ``samples``: those of an epoch."""
        if self.steps is not None:
            return float(self.steps * initial)
        return None if samples is None or self.epochs is None else float(self.epochs * samples)

    def reached(self, progress: Progress, epoch: int, *, samples: int | None, initial: int, adaptive: bool) -> bool:
        """Return whether training has reached the goal. Time is agreed on elsewhere."""
        if progress.stopped:
            return True
        goal = self.useful(samples=samples, initial=initial)
        if adaptive and goal is not None:
            # A sum of many fractions: without the tolerance, a missing billionth would cost another epoch.
            return progress.useful >= goal - ROUNDING * (samples or initial)
        if self.steps is not None:
            return progress.step >= self.steps
        return self.epochs is not None and epoch >= self.epochs

    def followed(
        self, progress: Progress, epoch: int, *, samples: int | None, batch: int, initial: int, worth: float | None
    ) -> bool:
        """Return whether another pass follows the one of this epoch, as far as can be told. ``batch``: the size of the global batch;
        ``worth``: the worth of one of its samples, None if batches do not adapt."""
        if self.steps is None and self.epochs is None:
            return True
        if samples is None or (worth is None and self.epochs is not None):
            return self.epochs is None or epoch + 1 < self.epochs
        left = samples - len(progress.trained)
        if worth is None:
            return progress.step + left // batch < (self.steps or 0)
        return (
            progress.useful + left * worth < (self.useful(samples=samples, initial=initial) or 0.0) - ROUNDING * samples
        )
