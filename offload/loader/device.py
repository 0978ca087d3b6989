"""The last step of a batch, on the side of the program: into pinned memory, and to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data._utils.pin_memory import pin_memory


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Finishes a batch, on the loader's thread.

    ``pin``: whether to pin its memory, if there is an accelerator. ``on_device``: a function to apply, after the batch has moved to
    the accelerator, if there is one.
    """

    pin: bool
    on_device: Callable[[Any], Any] | None

    def __call__(self, batch: Any) -> Any:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if device is not None and (self.pin or self.on_device is not None):
            batch = pin_memory(batch, device.type)  # type: ignore[no-untyped-call]
        if self.on_device is None:
            return batch
        if device is None:
            with torch.no_grad():
                return self.on_device(batch)
        # A stream of its own: the copy runs beside the training's kernels.
        stream = torch.Stream(device)
        with torch.no_grad(), stream:
            moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
            finished = self.on_device(moved)
        stream.synchronize()
        return finished
