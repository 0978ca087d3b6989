"""The p-norm with which both halves of the model add up two overlapping times."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# Least variation of task times: other programs on a shared machine add more than any measurement shows
LEAST_VARIATION = 0.1
MOST_OVERLAP = 64.0  # largest power: beyond it the p-norm is the maximum, to one percent
POINTS = 9  # Gauss-Hermite points of a mean over a ratio that is unsure


def overlapped(first: ArrayLike, second: ArrayLike, power: float) -> Floats:
    """``(first^power + second^power)^(1/power)``, elementwise over broadcast arrays of times ≥ 0.

    ``power`` 1 is their sum (nothing overlaps), infinity their maximum (the shorter hides behind the longer).
    The result is computed relative to the longer time, so that no power overflows.
    """
    a, b = np.broadcast_arrays(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    longer, shorter = np.maximum(a, b), np.minimum(a, b)
    # If the longer time is 0 or infinite, so is the result.
    ratio = np.divide(shorter, longer, out=np.zeros(a.shape), where=(longer > 0) & np.isfinite(longer))
    if np.isinf(power):
        return np.asarray(longer)
    return np.asarray(longer * (1 + ratio**power) ** (1 / power))


def mean_overlapped(first: ArrayLike, second: ArrayLike, power: float, spread: ArrayLike) -> Floats:
    """The mean of :func:`overlapped` where ``first`` is unsure, elementwise over broadcast arrays.

    ``first`` is the mean of a log-normal time, and ``spread`` the standard deviation of its logarithm. Weighed by that time, ``second``
    over it is log-normal too, with the same spread and the mean ``second / first``: one quadrature over the ratio is enough. The mean is
    longer than the time of the means, most where both are alike.
    """
    a, b, s = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (first, second, spread)))
    total = np.zeros(a.shape)
    for point, weight in normal_points(POINTS):
        total += weight * overlapped(a, b * np.exp(s * point - s**2 / 2), power)
    return total


def normal_points(count: int) -> list[tuple[float, float]]:
    """Points and weights of the Gauss-Hermite quadrature over a standard normal distribution."""
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    return list(zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True))


def overlap_of_queue(buffer: float, variation: float) -> float:
    """The power with which fetching and computing overlap through a queue: ``ln 2 / ln(1 + variation²/(buffer + 2))``.

    Args:
        buffer: the number of items that fit between the two sides.
        variation: coefficient of variation of an item's time on either side.

    Two equally fast stations with a buffer between them reach ``(B + 2)/(B + 2 + c²)`` of the rate of either one: exact for
    exponential times (Buzacott, Shanthikumar, "Stochastic Models of Manufacturing Systems", 1993), and within 3 % of a
    simulation for variations from 0.1 to 1. Within [1, ``MOST_OVERLAP``].
    """
    # From 2^(1/power) = 1 + c²/(B + 2): both sides are equally fast there.
    lost = np.log1p(variation**2 / (buffer + 2))
    return float(np.clip(np.log(2) / lost if lost > 0 else np.inf, 1.0, MOST_OVERLAP))


def plain(value: Any) -> Any:
    """An array without dimensions as a Python number, any other value unchanged: scalars in, a scalar out."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else value
