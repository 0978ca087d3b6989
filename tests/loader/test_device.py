"""The last step of a DataLoader's batch, as far as it shows without an accelerator."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from offload.loader import device
from offload.loader.device import Finish


def test_what_on_device_returns_on_the_cpu_belongs_to_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = object()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    recorded: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, to: recorded.append((tensor.device.type, to)))
    finish = Finish(pin=False, on_device=lambda batch: batch)
    finish._device = finish._placement._device = torch.device("meta")  # as on a machine with an accelerator
    finish._placement._stream = stream
    finish.hand_over({"image": torch.ones(2, device="meta"), "lengths": torch.ones(2)})
    assert recorded == [("meta", stream)]


class Graphs:
    """A batch that is an object, and moves itself."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> Graphs:
        self.x = self.x.to(device)
        return self


def test_a_batch_that_is_an_object_moves_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = MagicMock()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(device, "pin_memory", lambda batch, kind: batch)
    recorded: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, to: recorded.append((tensor.device.type, to)))
    finish = Finish(pin=False, on_device=lambda batch: batch)
    finish._device = finish._placement._device = torch.device("meta")  # as on a machine with an accelerator
    finish._placement._stream = stream
    batch = finish({"graphs": Graphs()})
    assert batch["graphs"].x.device.type == "meta"
    finish.hand_over(batch)
    assert recorded == [("meta", stream)]
