"""Repeated measurements of one rate, with the noise that they show themselves."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

LONGEST = 12  # measurements that count: a mean of more would follow drift too slowly
REMEMBERED = 48  # differences that tell the noise
PRIOR_NOISE = 0.1  # relative noise of one measurement, until several tell better
PRIOR_WEIGHT = 1  # weight of this prior, in measurements
OF_MEDIAN = 0.954  # the median of the absolute difference of two normal values, over their standard deviation
CHANGED = 3.5  # standard deviations by which two measurements in a row differ from the others if the rate has changed


@dataclass(frozen=True, kw_only=True)
class Series:
    """The newest measurements of a rate since it last changed.

    Args:
        logs: their logarithms, oldest first.
        differences: absolute differences between neighbours, also from before the last change.
    """

    logs: tuple[float, ...] = ()
    differences: tuple[float, ...] = ()

    def with_value(self, value: float) -> Series:
        """The series with one more measurement, above 0. Two in a row that differ from the others start it anew."""
        log = math.log(value)
        differences = (*self.differences, abs(log - self.logs[-1]))[-REMEMBERED:] if self.logs else self.differences
        logs = (*self.logs, log)[-LONGEST:]
        if len(logs) > 2:
            others, newest = logs[:-2], logs[-2:]
            mean = statistics.fmean(others)
            # The noise from before: the change itself must not hide in it.
            limit = CHANGED * self.noise * math.sqrt(1 + 1 / len(others))
            if all(value > mean + limit for value in newest) or all(value < mean - limit for value in newest):
                # Two in a row: a single outlier must not throw away what is known.
                logs = newest
        return Series(logs=logs, differences=differences)

    @property
    def mean(self) -> float:
        """The mean of the logarithms."""
        return statistics.fmean(self.logs)

    @property
    def noise(self) -> float:
        """The relative standard deviation of one measurement."""
        count = len(self.differences)
        # From differences of neighbours, not from the mean: a slow drift is no noise. The median ignores jumps.
        seen = statistics.median(self.differences) / OF_MEDIAN if count else 0.0
        return math.sqrt((PRIOR_WEIGHT * PRIOR_NOISE**2 + count * seen**2) / (PRIOR_WEIGHT + count))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.noise / math.sqrt(len(self.logs))
