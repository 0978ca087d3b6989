"""Gradient noise, which determines the value of a sample in a larger batch.

Sources: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, for the noise and its estimate; Johnson et
al., "AdaScale SGD", ICML 2020, for the gain; Qiao et al., "Pollux", OSDI'21, for the efficiency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offload.errors import ConfigError
from offload.model.checks import check_number
from offload.model.overlap import plain


@dataclass(frozen=True)
class GradientNoise:
    """Noise of the gradient at the initial global batch M0.

    Args:
        sqr: squared norm of the expected gradient, ``|G|²``, ≥ 0.
        var: trace of the covariance of the gradient of a batch of M0, ``tr(Σ)``, ≥ 0.
        batch_size: M0.

    Raises:
        ConfigError: for a value out of its range.
    """

    sqr: float
    var: float
    batch_size: float

    def __post_init__(self) -> None:
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

    def _scale(self, batch_size: ArrayLike) -> Any:
        sizes = np.asarray(batch_size, dtype=float)
        if np.any(~(sizes >= self.batch_size)):
            raise ConfigError(
                f"efficiency is defined for global batches of at least the initial {self.batch_size:g}, "
                f"found {np.min(sizes):g}."
            )
        return sizes / self.batch_size


def noise_from_gradients(
    mean_square_norm: float, square_norm_of_mean: float, count: int, samples_each: float, batch_size: float
) -> GradientNoise:
    """:func:`gradient_moments` as noise; what is below 0 by chance is 0."""
    sqr, var = gradient_moments(mean_square_norm, square_norm_of_mean, count, samples_each, batch_size)
    return GradientNoise(sqr=max(sqr, 0.0), var=max(var, 0.0), batch_size=batch_size)


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
