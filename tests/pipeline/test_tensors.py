"""Tensors inside batches: what a step to a device changes, in structures of any kind."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from offload.pipeline.tensors import map_tensors


def test_a_packed_sequence_moves_and_its_batch_sizes_stay_on_the_cpu() -> None:
    batch = {"text": pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False), "label": torch.ones(2)}
    moved = map_tensors(batch, lambda tensor: tensor.to("meta"))
    text = moved["text"]
    assert isinstance(text, PackedSequence)
    assert (text.data.device.type, text.batch_sizes.device.type, text.sorted_indices.device.type) == (
        "meta",
        "cpu",
        "meta",
    )
    doubled = map_tensors(batch["text"], lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor)
    assert pad_packed_sequence(doubled, batch_first=True)[0].tolist() == [[2.0, 0.0, 0.0], [2.0, 2.0, 2.0]]


class Output(OrderedDict[str, Any]):
    """A mapping whose keys are attributes, too, and which refuses update(), as the outputs of Hugging Face's models."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **named: Any) -> None:
        raise Exception("You cannot use ``update`` on a Output instance.")


def test_a_mapping_that_refuses_update_keeps_its_type_and_attributes() -> None:
    batch = Output()
    batch["x"], batch["names"] = torch.ones(2), ["a", "b"]
    moved = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(moved) is Output
    assert moved.x.tolist() == moved["x"].tolist() == [2.0, 2.0]
    assert moved.names == ["a", "b"]
    assert batch.x.tolist() == [1.0, 1.0], "the one before stays as it is"
