"""Step time of the accelerators, without the input side.

Source of the equations: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning",
OSDI'21, section 3.2; symbols in brackets are the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offload.errors import ConfigError
from offload.model.checks import check_number
from offload.model.overlap import Floats, overlapped, plain


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step of K workers on N nodes, each with local batches of m and s accumulation steps::

        T_grad = alpha_compute + beta_compute·m
        T_sync = 0                                          K = 1
                 alpha_intra + beta_intra·max(K − 2, 0)     N = 1
                 alpha_inter + beta_inter·max(K − 2, 0)     N > 1
        T_gpu  = s·T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)

    Args:
        alpha_compute: seconds of a micro-batch whatever its size: launches, optimizer [α_grad].
        beta_compute: seconds per sample of a micro-batch's forward and backward [β_grad].
        alpha_intra: seconds to synchronise two workers of one node [α_sync^local].
        beta_intra: additional seconds for each further worker [β_sync^local].
        alpha_inter: seconds to synchronise two workers of two nodes [α_sync^node].
        beta_inter: additional seconds for each further worker [β_sync^node].
        gamma: how far synchronisation overlaps with backward: 1 not at all, 10 almost entirely [γ].

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

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high = (1.0, 10.0) if field.name == "gamma" else (0.0, float("inf"))
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
        last = overlapped(compute, self.sync_time_s(nodes, workers), self.gamma)
        return plain(np.asarray(np.asarray(accum_steps) * compute + last))

    def on_faster_device(self, speed: float) -> StepTime:
        """The same model on a device ``speed`` times as fast: computing shrinks, synchronisation does not."""
        speed = check_number("the device's speed", speed, above=0.0)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        compute = {name: values[name] / speed for name in ("alpha_compute", "beta_compute")}
        return StepTime(**{**values, **compute})
