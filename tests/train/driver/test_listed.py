"""What a run finds out about its data sets before it begins."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import offload
from offload.pipeline.index.source import Index
from offload.pipeline.order.shuffling import Draws
from offload.train.driver.listed import Listed, classes_that_differ


def listed(name: str, classes: tuple[str, ...]) -> Listed:
    data = torch.utils.data.TensorDataset(torch.zeros(2, 1))
    pipeline = offload.from_torch(data, columns=["x"])
    assert pipeline.list is not None
    made = pipeline.list()
    index = Index(name=name, rows=made.rows, reader=made.reader, classes=classes)
    return Listed(name=name, pipeline=pipeline, index=index, shuffle=False)


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        ("abc", "abc", None),
        ("abc", "ab", None),  # its labels mean the same
        ("abc", "", None),  # it does not tell
        ("", "ab", None),
        ("abc", "acd", "label 1 is 'c' in 'val' and 'b' in 'train': their labels do not mean the same"),
        ("ab", "abc", "label 2 is 'c' in 'val' and no class in 'train': their labels do not mean the same"),
    ],
)
def test_labels_that_mean_different_classes_are_told(train: str, val: str, said: str | None) -> None:
    found = classes_that_differ({"train": listed("train", tuple(train)), "val": listed("val", tuple(val))})
    assert len(found) == (said is not None)
    if said is not None:
        assert found[0].sentence({}).startswith(said)


def test_an_interrupted_epoch_goes_on_only_in_an_order_of_the_same_kind() -> None:
    """Its checkpoints count trained samples by their places in that order."""
    in_order = listed("train", ())
    assert in_order.index is not None
    drawn = dataclasses.replace(in_order.index, draws=Draws(weights=np.ones(2), number=2))
    kinds = [
        in_order,
        dataclasses.replace(in_order, shuffle=True),
        dataclasses.replace(in_order, shuffle=True, index=drawn),
    ]
    assert len({each.identity for each in kinds}) == len(kinds)
    assert in_order.identity == listed("train", ()).identity


def tiles(slide: dict[str, int]) -> Iterator[dict[str, int]]:
    yield from ({"x": slide["x"] + part} for part in range(1000))


def test_a_generator_may_make_batches_of_fewer_inputs() -> None:
    slides = [{"x": 0}, {"x": 1000}]
    for transform, refused in ((tiles, False), (None, True)):
        trainer = offload.Trainer(
            lambda ctx: None, datasets={"train": offload.from_torch(slides, transform)}, batch_size=64
        )
        with pytest.raises(offload.ConfigError, match="only 2 samples") if refused else contextlib.nullcontext():
            assert trainer.listed("train", lambda text: None).samples == 2
