"""Tests and intervals for runs that differ in one thing and share their seeds. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class NoWorse:
    """A one-sided paired t-test of "at most ``margin`` worse".

    Attributes:
        difference: the mean difference; positive: better.
        deviation: standard deviation of the differences.
        lower: the bound above which the true difference lies with 95 % confidence.
        margin: the loss that counts as none.
        p: the probability of such differences if the true loss were the margin.
    """

    difference: float
    deviation: float
    lower: float
    margin: float
    p: float

    @property
    def shown(self) -> bool:
        """Whether the test shows that it is no worse."""
        return self.lower > -self.margin


def no_worse(values: Sequence[float], base: Sequence[float], margin: float) -> NoWorse:
    """Compare values, of which larger ones are better, with those of the same seeds in ``base``.

    Raises ValueError for fewer than two pairs, or for unequal numbers of values.
    """
    differences = np.subtract(values, base, dtype=float)
    if len(values) != len(base) or len(differences) < 2:
        raise ValueError(f"a paired test needs two seeds that both have, found {len(values)} and {len(base)}.")
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    error, freedom = deviation / math.sqrt(len(differences)), len(differences) - 1
    lower = mean - float(scipy.stats.t.ppf(CONFIDENCE, freedom)) * error
    if error == 0:
        p = 0.0 if mean > -margin else 1.0
    else:
        p = float(scipy.stats.t.sf((mean + margin) / error, freedom))
    return NoWorse(mean, deviation, lower, margin, p)


def ratio_interval(
    values: Sequence[float], base: Sequence[float], *, draws: int = 10_000
) -> tuple[float, float, float]:
    """The geometric mean of ``values / base`` over pairs, with the bounds of its 95 % interval by bootstrap over pairs.

    Raises ValueError for no pair, or for values that are not positive and finite.
    """
    pairs = np.array([values, base], dtype=float)
    if pairs.shape[1] == 0 or not np.all(np.isfinite(pairs)) or np.any(pairs <= 0):
        raise ValueError(f"ratios need pairs of positive numbers, found {list(values)} and {list(base)}.")
    logs = np.log(pairs[0] / pairs[1])
    chosen = np.random.default_rng(0).integers(len(logs), size=(draws, len(logs)))
    low, high = np.quantile(np.mean(logs[chosen], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.exp(np.mean(logs))), float(np.exp(low)), float(np.exp(high))
