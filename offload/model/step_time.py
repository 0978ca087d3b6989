"""Step time of the accelerators, without the input side.

Source of the equations: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning",
OSDI'21, section 3.2; symbols in brackets are the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import scipy  # loads scipy.special at first use
from numpy.typing import ArrayLike

from offload.errors import ConfigError
from offload.model.checks import check_number
from offload.model.overlap import Floats, overlapped, plain

TIMES = ("alpha_compute", "beta_compute", "alpha_intra", "beta_intra", "alpha_inter", "beta_inter")
PARAMETERS = (*TIMES, "gamma")
"""What a fit learns, in the order of its vectors."""
BOUNDS = {**dict.fromkeys(TIMES, (0.0, math.inf)), "gamma": (1.0, 10.0), "variation": (0.0, 1.0)}
QUANTILES = 64  # number of quantiles over which :func:`slowest` takes the mean


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step of K workers on N nodes, each with local batches of m and s accumulation steps::

        T_grad = alpha_compute + beta_compute·m
        T_sync = 0                                          K = 1
                 alpha_intra + beta_intra·max(K − 2, 0)     N = 1
                 alpha_inter + beta_inter·max(K − 2, 0)     N > 1
        T_gpu  = s·T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)

    Workers wait for the slowest of them: both T_grad of T_gpu are :func:`slowest` times as long.

    Args:
        alpha_compute: seconds of a micro-batch whatever its size: launches, optimizer [α_grad].
        beta_compute: seconds per sample of a micro-batch's forward and backward [β_grad].
        alpha_intra: seconds to synchronise two workers of one node [α_sync^local].
        beta_intra: additional seconds for each further worker [β_sync^local].
        alpha_inter: seconds to synchronise two workers of two nodes [α_sync^node].
        beta_inter: additional seconds for each further worker [β_sync^node].
        gamma: how far synchronisation overlaps with backward: 1 not at all, 10 almost entirely [γ].
        variation: coefficient of variation of one worker's computing from step to step.

    Raises:
        ConfigError: if a parameter is negative or not finite, gamma is outside [1, 10], or a step would take no time.
    """

    alpha_compute: float
    beta_compute: float
    alpha_intra: float = 0.0
    beta_intra: float = 0.0
    alpha_inter: float = 0.0
    beta_inter: float = 0.0
    gamma: float = 1.0
    variation: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high = BOUNDS[field.name]
            check_number(field.name, getattr(self, field.name), least=low, most=high)
        if self.alpha_compute + self.beta_compute <= 0:
            raise ConfigError("alpha_compute and beta_compute are both 0: a step that takes no time was not measured.")

    def compute_time_s(self, local_batch_size: ArrayLike) -> Any:
        """T_grad: seconds of one micro-batch's forward and backward."""
        return plain(np.asarray(self.alpha_compute + self.beta_compute * np.asarray(local_batch_size, dtype=float)))

    def sync_time_s(self, nodes: ArrayLike, workers: ArrayLike) -> Any:
        """T_sync: seconds of one synchronisation that nothing hides."""
        n, k = np.broadcast_arrays(np.asarray(nodes), np.asarray(workers))
        further = np.maximum(k - 2, 0)
        inter, intra = self.alpha_inter + self.beta_inter * further, self.alpha_intra + self.beta_intra * further
        return plain(np.where(k <= 1, 0.0, np.where(n > 1, inter, intra)))

    def predict(
        self, nodes: ArrayLike, workers: ArrayLike, local_batch_size: ArrayLike, accum_steps: ArrayLike = 0
    ) -> Any:
        """T_gpu: seconds per optimizer step, over broadcast arrays (a float for scalars)."""
        compute: Floats = np.asarray(self.compute_time_s(local_batch_size))
        if self.variation > 0:
            # Micro-batches vary independently, so their sum varies less.
            varies = self.variation / np.sqrt(np.asarray(accum_steps, dtype=float) + 1)
            compute = compute * slowest(workers, varies)
        # Only the last micro-batch synchronises, so only its backward can hide it.
        last = overlapped(compute, self.sync_time_s(nodes, workers), self.gamma)
        return plain(np.asarray(np.asarray(accum_steps) * compute + last))

    def on_faster_device(self, speed: float) -> StepTime:
        """The same model on a device ``speed`` times as fast: computing shrinks, synchronisation does not."""
        speed = check_number("the device's speed", speed, above=0.0)
        return replace(self, alpha_compute=self.alpha_compute / speed, beta_compute=self.beta_compute / speed)

    def moved(self, change: Floats) -> StepTime:
        """The same with ``change`` added to its ``PARAMETERS``, within their bounds; a step always takes some time."""
        values = {name: getattr(self, name) + by for name, by in zip(PARAMETERS, change.tolist(), strict=True)}
        inside = {name: min(max(value, BOUNDS[name][0]), BOUNDS[name][1]) for name, value in values.items()}
        inside["beta_compute"] = max(inside["beta_compute"], 1e-12)
        return replace(self, **inside)


def slowest(workers: ArrayLike, variation: ArrayLike) -> Any:
    """Expected time of the slowest of K workers relative to the mean of one, at least 1, over broadcast arrays.

    Times are log-normal and independent, with the coefficient of variation ``variation``. The mean is over quantiles: the slowest is
    below x with probability F(x)^K.
    """
    k, c = np.broadcast_arrays(np.asarray(workers, dtype=float), np.asarray(variation, dtype=float))
    # A plan asks for thousands of shapes with a few numbers of workers: compute what differs, as the parts of complex numbers.
    pairs, place = np.unique(k + 1j * c, return_inverse=True)
    # The parameter of a log-normal distribution whose mean is 1 and whose standard deviation is c.
    sigma = np.sqrt(np.log1p(pairs.imag**2))[:, None]
    # The middle of each quantile: the ends would be infinite.
    below = (np.arange(QUANTILES) + 0.5) / QUANTILES
    normal = scipy.special.ndtri(below ** (1 / pairs.real[:, None]))
    mean = np.mean(np.exp(sigma * normal - sigma**2 / 2), axis=-1)[place.reshape(k.shape)]
    return plain(np.where(k > 1, np.maximum(mean, 1.0), 1.0))
