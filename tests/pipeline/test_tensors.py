"""Tensors inside batches: what a step to a device changes, in structures of any kind."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from offload.pipeline.blocks.tensors import map_tensors, moved, record_use


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


class Boxes:
    """As detectron2's: an object of a class that is no structure of Python, and moves to a new object."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Boxes:
        return Boxes(self.tensor.to(device))


class Graphs:
    """As a Batch of torch_geometric: it moves in place, and holds objects that hold tensors, and itself."""

    def __init__(self) -> None:
        self.stores: dict[str, Any] = {"x": torch.ones(3), "boxes": [Boxes(torch.ones(1, 4))], "names": ["a"]}
        self.parent, self.kind = self, Graphs
        self.weights = np.ones(2)

    def to(self, device: torch.device) -> None:
        self.stores["x"] = self.stores["x"].to(device)
        self.stores["boxes"] = [boxes.to(device) for boxes in self.stores["boxes"]]


class Moment:
    """As in libraries of times and of units: a method ``to`` that takes no device."""

    def to(self, zone: str) -> Moment:
        raise TypeError(f"expected string, got {zone!r}")


def test_objects_that_know_how_to_move_do() -> None:
    module, moment, graphs = torch.nn.Linear(1, 1), Moment(), Graphs()
    batch = {"graphs": graphs, "instances": [Boxes(torch.ones(2, 4))], "other": (module, moment, Moment, "text", None)}
    there = moved(batch, torch.device("meta"))
    assert there["graphs"] is graphs
    assert graphs.stores["x"].device.type == graphs.stores["boxes"][0].tensor.device.type == "meta"
    assert there["instances"][0].tensor.device.type == "meta"
    assert there["other"] == batch["other"]
    assert module.weight.device.type == "cpu", "a module in a batch stays where its owner put it"
    assert moved(graphs, torch.device("meta")) is graphs, "a batch that is such an object itself"


def test_the_memory_within_such_objects_is_kept_for_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, Any]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((id(tensor), stream)))

    class Hidden:
        def to(self, device: torch.device) -> Hidden:
            return self

        def record_stream(self, stream: Any) -> None:
            recorded.append((0, stream))
            raise RuntimeError("The graph must be on the GPU.")

    device = torch.device("meta")
    batch = moved([Graphs(), Hidden(), torch.ones(2), Moment()], device)
    graphs, _, plain, _ = batch
    record_use([*batch, torch.ones(2)], device, "stream")
    within = [graphs.stores["x"], graphs.stores["boxes"][0].tensor]
    assert sorted(recorded) == sorted([(0, "stream"), *((id(each), "stream") for each in [*within, plain])])


@pytest.mark.filterwarnings("ignore:Sparse")  # torch says that these are in beta
def test_of_sparse_tensors_within_objects_the_parts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []

    def record(tensor: torch.Tensor, stream: Any) -> None:
        assert tensor.layout == torch.strided, "torch records no other"
        recorded.append(tensor.numel())

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    dense = torch.eye(3)
    held = Boxes(dense)
    held.tensor = [dense.to_sparse_coo(), dense.to_sparse_csr(), dense.to_sparse_csc()]  # type: ignore[assignment]
    record_use(held, torch.device("cpu"), "stream")
    assert sorted(recorded) == sorted([6, 3, 4, 3, 3, 4, 3, 3])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layout", "parts"), [(torch.jagged, [3, 5]), (torch.strided, [5])])
def test_of_nested_tensors_the_parts_are_kept(
    monkeypatch: pytest.MonkeyPatch, layout: torch.layout, parts: list[int]
) -> None:
    recorded: list[int] = []

    def record(tensor: torch.Tensor, stream: Any) -> None:
        assert not tensor.is_nested
        recorded.append(tensor.numel())

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    batch = {"clips": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)}
    record_use(batch, torch.device("cpu"), "stream")
    assert sorted(recorded) == parts
