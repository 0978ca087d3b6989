"""The largest local batch that the device's memory holds, from what batches were seen to take.

Where it stops: a batch that did not fit all the same ends in :class:`DeviceMemoryError`, and is cut smaller by
:class:`offload.train.monitor.Monitor`.
"""

from __future__ import annotations

import math

import torch

from offload.errors import RunError

USABLE = 0.9  # of the device: what is left over serves fragments, and kernels that take more for other sizes


class DeviceMemoryError(RunError):
    """A batch did not fit into the device's memory; the run goes on with smaller ones."""


def largest_local_batch(local_batch_size: int, *, peak: float, resident: float, total: float) -> int:
    """Samples of a local batch that fit. ``peak`` bytes were allocated at most while batches of ``local_batch_size`` were
    trained, ``resident`` of them also between batches (model, optimizer); the device has ``total``."""
    each = (peak - resident) / local_batch_size
    if each <= 0:
        return local_batch_size
    return max(math.floor((USABLE * total - resident) / each), 1)


class DeviceMemory:
    """What one worker's device was seen to hold. Knows nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._resident = 0

    def between_batches(self) -> None:
        """No batch is under way: what is allocated now stays."""
        if self._device is not None:
            self._resident = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def largest(self, local_batch_size: int) -> int | None:
        """The largest local batch, after a batch of this size; None where it is not known."""
        if self._device is None:
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        return largest_local_batch(
            local_batch_size,
            peak=torch.cuda.max_memory_allocated(self._device),
            resident=self._resident,
            total=free + torch.cuda.memory_reserved(self._device),
        )
