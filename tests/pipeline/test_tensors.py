"""Tensors inside batches: what a step to a device changes, in structures of any kind."""

from __future__ import annotations

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
