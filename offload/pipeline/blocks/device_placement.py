"""Place batches on an accelerator while the program's kernels run, for the DataLoader and the Trainer alike.

Where it stops: it moves tensors of any memory, and its callers pin them first. Only from pinned memory does a copy run beside kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.pipeline.blocks.tensors import moved, record_use


class DevicePlacement:
    """Moves batches to a device on a stream of its own, and applies ``steps`` to them there. Without a device, batches stay where they
    are."""

    def __init__(self, device: torch.device | None, steps: Sequence[Callable[[Any], Any]] = ()) -> None:
        self._device, self._steps = device, tuple(steps)
        # A stream of its own: on the program's stream, the copy would wait for all kernels before it.
        self._stream = None if device is None else torch.Stream(device)

    @property
    def copies(self) -> bool:
        """Whether batches move to a device."""
        return self._stream is not None

    def place(self, batch: Any) -> tuple[Any, torch.Event | None]:
        """The finished batch, and the event of its arrival on the device; None if it has not moved."""
        if self._stream is None:
            return self._finished(batch), None
        assert self._device is not None
        with self._stream:
            finished = self._finished(moved(batch, self._device))
            return finished, self._stream.record_event()

    def hand_over(self, batch: Any, event: torch.Event | None = None) -> None:
        """Let the current stream of this thread use a batch, once it has arrived. Without ``event``, it has.

        torch knows only that our stream made the batch. It would give its memory to the next batch while a kernel still reads it.
        """
        if self._stream is None:
            return
        assert self._device is not None
        current = torch.accelerator.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
        record_use(batch, self._device, current)

    def _finished(self, batch: Any) -> Any:
        if not self._steps:
            return batch
        with torch.no_grad():
            for step in self._steps:
                batch = step(batch)
        return batch
