"""The last step of a batch, on the side of the program: into pinned memory, and to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from offload.pipeline.blocks.device_placement import DevicePlacement


class Finish:
    """Finishes the batches of an iteration. Construct it on the program's thread: the current device is that thread's.

    Args:
        pin: whether to pin a batch's memory, if there is an accelerator.
        on_device: a function to apply, after the batch has moved to the accelerator, if there is one.
    """

    def __init__(self, *, pin: bool, on_device: Callable[[Any], Any] | None) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device: torch.device | None = None
        if accelerator is not None and (pin or on_device is not None):
            self._device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        self._works = self._device is not None or on_device is not None
        # Without on_device, batches stay in pinned memory, as torch's DataLoader leaves them.
        self._placement = DevicePlacement(None) if on_device is None else DevicePlacement(self._device, [on_device])

    @property
    def works(self) -> bool:
        """Whether it does anything to a batch, which takes time."""
        return self._works

    def begin(self) -> None:
        """Use the program's device on this thread, which makes batches from now on."""
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)

    def __call__(self, batch: Any) -> Any:
        """The finished batch. Runs on the loader's thread."""
        if self._device is not None:
            batch = pin_memory(batch, self._device.type)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            finished, arrived = self._placement.place(batch)
        if arrived is not None:
            arrived.synchronize()  # the program may use a batch on any stream, which need not wait then
        return finished

    def hand_over(self, batch: Any) -> None:
        """Note, on the program's thread, that its stream uses the batch: its memory must not serve another batch before."""
        self._placement.hand_over(batch)
