"""The 95 % range of a step's time, evaluated at the configuration that is planned.

Independent uncertainties add in squares, as differences of logarithms, for the slow end and the fast end apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from offload.model.overlap import Floats
from offload.model.step_time import StepTime

# 95 % half-widths that no probe measures; all are assumptions.
# Spread between the probed machine and another of its type: a standard deviation of 3 %
DAY_TO_DAY = 0.06
LACK_OF_FIT = 0.02  # error of the step's formula between the measured batch sizes
EXTRAPOLATION = 0.03  # further error for each doubling or halving beyond them
# Uncertain share of the wait for the slowest worker: few steps are measured, and workers may vary together
STRAGGLER_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """Relative 95 % half-widths: 0.03 means ± 3 %.

    Args:
        core_seconds_per_sample: of the input side.
        step: of the step, wherever it is planned; without effect if there are ``step_directions``.
        step_directions: what the fit leaves open: each row is an independent change of the step's ``PARAMETERS`` that reaches
            the edge of what the measurements allow.
        local_batch_sizes: the smallest and the largest local batch that were measured.
        day_to_day: between the measured machines and those of the plan, of either side.
    """

    core_seconds_per_sample: float = 0.0
    step: float = 0.0
    step_directions: tuple[tuple[float, ...], ...] = ()
    local_batch_sizes: tuple[float, float] | None = None
    day_to_day: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """The step time on one type of node, and what is unsure about it. Each of ``ends`` holds the fast and the slow end of one
    uncertainty."""

    step_time: StepTime
    ends: tuple[tuple[StepTime, StepTime], ...] = ()
    uncertainty: Uncertainty = Uncertainty()

    def factors(
        self, nodes: ArrayLike, workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike
    ) -> tuple[Floats, Floats]:
        """The fast and the slow end of the step's time there, relative to its estimate."""
        at = (nodes, workers, local_batch_size, accum_steps)
        centre = np.asarray(self.step_time.predict(*at))
        known = self.uncertainty
        alike = np.log1p(known.day_to_day) ** 2 + self._misfit(np.asarray(local_batch_size, dtype=float)) ** 2
        if not known.step_directions:
            alike = alike + np.log1p(known.step) ** 2
        fast, slow = alike + np.zeros(centre.shape), alike + np.zeros(centre.shape)
        for pair in self._pairs():
            off = [np.log(np.asarray(end.predict(*at)) / centre) for end in pair]
            slow += np.maximum(np.maximum(*off), 0.0) ** 2
            fast += np.minimum(np.minimum(*off), 0.0) ** 2
        return np.exp(-np.sqrt(fast)), np.exp(np.sqrt(slow))

    def _pairs(self) -> Iterable[tuple[StepTime, StepTime]]:
        yield from self.ends
        for direction in np.array(self.uncertainty.step_directions, dtype=float).reshape(-1, 7):
            if direction.any():
                yield self.step_time.moved(direction), self.step_time.moved(-direction)
        if (varies := self.step_time.variation) > 0:
            yield (
                replace(self.step_time, variation=varies * (1 - STRAGGLER_SHARE)),
                replace(self.step_time, variation=min(varies * (1 + STRAGGLER_SHARE), 1.0)),
            )

    def _misfit(self, size: Floats) -> Floats:
        """How far the true step may be from the formula, by the distance from the sizes that were measured."""
        if self.uncertainty.local_batch_sizes is None:
            return np.zeros(())
        least, most = self.uncertainty.local_batch_sizes
        doublings = np.maximum(np.log2(np.maximum(size, 1) / most), np.log2(least / np.maximum(size, 1)))
        return np.asarray(np.hypot(LACK_OF_FIT, EXTRAPOLATION * np.maximum(doublings, 0.0)))
