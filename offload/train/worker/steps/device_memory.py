"""Estimate the largest local batch that fits into the device's memory, from measured batches.

Where it stops: a batch that does not fit raises :class:`DeviceMemoryError`, and :class:`offload.train.hub.board.Board` bounds the
next ones.
"""

from __future__ import annotations

import math

import torch

from offload.errors import RunError

USABLE = 0.9  # share of the device's memory; the rest is for fragmentation, and kernels that need more at other sizes


class DeviceMemoryError(RunError):
    """A batch did not fit into the device's memory; the run goes on with smaller ones."""


def largest_local_batch(local_batch_size: int, *, peak: float, resident: float, total: float) -> int:
    """The largest local batch that fits. Batches of ``local_batch_size`` allocated up to ``peak`` bytes; ``resident`` bytes of these
    stay between batches (model, optimizer). The device has ``total`` bytes."""
    # The memory of a batch is linear in its samples: model and optimizer stay, activations grow with each sample.
    sample_bytes = (peak - resident) / local_batch_size
    if sample_bytes <= 0:
        return local_batch_size
    return max(math.floor((USABLE * total - resident) / sample_bytes), 1)


class DeviceMemory:
    """The memory measured on one worker's device; nothing on a CPU.

    Attributes:
        most_local: the largest local batch that fits, by the last measurement; None if unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._resident = 0
        self.most_local: int | None = None

    def between_batches(self) -> None:
        """Measure the memory that stays allocated between batches."""
        if self._device is not None:
            self._resident = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def after_batch(self, local_batch_size: int) -> None:
        """Estimate the largest local batch that fits, after a batch of this size."""
        if self._device is None:
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        self.most_local = largest_local_batch(
            local_batch_size,
            peak=torch.cuda.max_memory_allocated(self._device),
            resident=self._resident,
            total=free + torch.cuda.memory_reserved(self._device),
        )
