"""Gradient noise, which determines the value of a sample in a larger batch.

Sources: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, for the noise and its estimate; Johnson et
al., "AdaScale SGD", ICML 2020, for the gain; Qiao et al., "Pollux", OSDI'21, for the efficiency. The variance of ``|G|²`` is that of a
U-statistic: Hoeffding, "A class of statistics with asymptotically normal distribution", 1948.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offload.errors import ConfigError
from offload.model.checks import check_number
from offload.model.overlap import Floats, plain

# Standard errors of |G|² that a choice of the batch adds. In simulations (benchmarks/model_check.py noise) more of them lose
# goodput to batches that are too small; with fewer of them, the batch is far too large now and then.
CAUTION = 0.7
TOLD = 0.5  # standard error of |G|², relative to it, up to which the noise counts as known


@dataclass(frozen=True)
class GradientNoise:
    """Noise of the gradient at the initial global batch M0.

    Args:
        sqr: squared norm of the expected gradient, ``|G|²``, ≥ 0.
        var: trace of the covariance of the gradient of a batch of M0, ``tr(Σ)``, ≥ 0.
        batch_size: M0.
        sqr_error: standard error of ``sqr``; 0: exact. That of ``var`` is small beside it.

    Raises:
        ConfigError: for a value out of its range.
    """

    sqr: float
    var: float
    batch_size: float
    sqr_error: float = 0.0

    def __post_init__(self) -> None:
        check_number("noise.sqr_error", self.sqr_error)
        check_number("noise.sqr", self.sqr)
        check_number("noise.var", self.var)
        check_number("noise.batch_size", self.batch_size, least=1, sane="the initial global batch, such as 64")

    def gain(self, batch_size: ArrayLike) -> Any:
        """``(var + sqr) / (var/k + sqr)`` with ``k = M/M0``: initial steps that one step of batch M is worth, in [1, k].

        Raises ConfigError for a batch below the initial one, where the model is not defined.
        """
        scale = self._scale(batch_size)
        noisy = self.var / scale + self.sqr
        whole = np.full_like(noisy, self.var + self.sqr)
        # Without signal and noise, a larger batch gains nothing.
        return plain(np.divide(whole, noisy, out=np.ones_like(noisy), where=noisy > 0))

    def efficiency(self, batch_size: ArrayLike) -> Any:
        """``gain(M) / k``: progress per sample against a sample at batch M0, in (0, 1]."""
        return plain(np.asarray(self.gain(batch_size) / self._scale(batch_size)))

    @property
    def cautious(self) -> GradientNoise:
        """Exact noise at the upper end of what ``|G|²`` may be: its efficiency bounds the true one from below."""
        if not self.sqr_error:
            return self
        # A larger |G|² means less noise in proportion, so larger batches are worth less: the cautious side.
        return replace(self, sqr=self.sqr + CAUTION * self.sqr_error, sqr_error=0.0)

    @property
    def told(self) -> bool:
        """Whether the measurement tells ``|G|²`` apart from 0 well enough to choose a batch."""
        return self.sqr_error <= TOLD * self.sqr

    def samples_missing(self, samples: int) -> int:
        """The least number of samples that must join the ``samples`` measured, until their gradients tell the noise.

        Where the noise hides ``|G|²``, its error falls with the number of samples. A ``|G|²`` below its error is taken as large as that.
        """
        if self.told:
            return 0
        likely = max(self.sqr, self.sqr_error)
        return math.ceil(samples * (self.sqr_error / (TOLD * likely) - 1))

    def _scale(self, batch_size: ArrayLike) -> Any:
        sizes = np.asarray(batch_size, dtype=float)
        if np.any(~(sizes >= self.batch_size)):
            raise ConfigError(
                f"efficiency is defined for global batches of at least the initial {self.batch_size:g}, "
                f"found {np.min(sizes):g}."
            )
        return sizes / self.batch_size


def noise_from_gradients(
    squares: Sequence[float], products: Sequence[float], samples_each: float, batch_size: float
) -> GradientNoise:
    """The noise, with the standard error of ``|G|²``, from gradients of ``samples_each`` samples each, at equal parameters.

    Args:
        squares: the gradients' squared norms, two or more.
        products: the scalar product of each gradient with the sum of those before it; 0 for the first.
        samples_each: the samples behind each gradient.
        batch_size: the initial global batch M0, to which the variance is converted.

    Estimates below 0 are chance, and count as 0. The error assumes nothing about the distribution, except that the signal has no
    preferred direction among those of the noise.

    Raises ConfigError for fewer than two gradients.
    """
    count, total = len(squares), float(np.sum(squares))
    # |Σg|² = Σ|g|² + 2·Σ(g_i · the sum of those before it): the gradients themselves need not be kept.
    square_of_mean = (total + 2 * float(np.sum(products))) / max(count, 1) ** 2
    sqr, var = gradient_moments(total / max(count, 1), square_of_mean, count, samples_each, batch_size)
    sqr, var = max(sqr, 0.0), max(var, 0.0)
    error = _error_of_square(np.asarray(products, dtype=float), sqr, var * batch_size / samples_each)
    return GradientNoise(sqr=sqr, var=var, batch_size=batch_size, sqr_error=error)


def _error_of_square(products: Floats, sqr: float, var_of_one: float) -> float:
    """The standard error of ``|G|²``: ``4·G'CG/n + 2·tr(C²)/(n(n−1))``, with ``C`` the covariance of one of ``n`` gradients.

    A product of gradient i with the sum of the i gradients before it has the variance ``i·tr(C²) + (i + i²)·G'CG``. So the spread of the
    products tells ``tr(C²)``, if ``G'CG`` is ``|G|²·tr(C²)/tr(C)``: that of a signal without a preferred direction.
    """
    count = len(products)
    if not var_of_one:
        return 0.0
    before = np.arange(1, count)
    mean, signal = float(np.sum(products)) / float(np.sum(before)), sqr / var_of_one
    square = var_of_one**2  # the most that tr(C²) can be: noise in a single direction
    if count > 2:
        spread = float(np.sum((products[1:] - before * mean) ** 2 / before)) / (count - 2)
        square = min(spread / (1 + signal * (1 + count / 2)), square)
    return math.sqrt(4 * signal * square / count + 2 * square / (count * (count - 1)))


def gradient_moments(
    mean_square_norm: float, square_norm_of_mean: float, count: int, samples_each: float, batch_size: float
) -> tuple[float, float]:
    """Unbiased ``(|G|², tr(Σ))`` from ``count`` gradients of ``samples_each`` samples each, at equal parameters.

    Either estimate may be negative: average these, not values cut at 0.

    Args:
        mean_square_norm: mean of the gradients' squared norms.
        square_norm_of_mean: squared norm of their mean.
        count: how many gradients, at least 2.
        samples_each: samples behind each.
        batch_size: the initial global batch M0 to which the variance is converted.

    Raises ConfigError for fewer than two gradients.
    """
    if count < 2:
        raise ConfigError(f"gradient noise needs at least two gradients to compare, found {count}.")
    # The mean of `count` gradients has 1/count of one gradient's variance.
    sqr = (count * square_norm_of_mean - mean_square_norm) / (count - 1)
    var_of_one = (mean_square_norm - square_norm_of_mean) * count / (count - 1)
    return float(sqr), float(var_of_one) * samples_each / batch_size
