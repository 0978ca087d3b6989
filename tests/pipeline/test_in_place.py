"""A transform may write to its samples; the data set that its process keeps stays as it was."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch

from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.describe.sources import from_torch
from tests.pipeline.index_pass import a_pass, stream_of

Sample = dict[str, Any]


class Named(NamedTuple):
    x: Any
    more: Any


@dataclass(frozen=True)
class Record:
    x: Any
    more: Any


def kept() -> list[Sample]:
    """What a data set may hold in memory: more than one chunk of samples."""
    shared = np.zeros(2)
    return [
        {
            "x": np.full(3, float(i)),
            "tensor": torch.full((2,), i),
            "half": torch.full((2,), i, dtype=torch.bfloat16),
            "same": shared,
            "target": {"boxes": np.zeros((2, 4)), "names": ["a"], "pair": (torch.zeros(2), PIL.Image.new("L", (2, 2)))},
            "named": Named(np.zeros(2), OrderedDict(x=np.zeros(2))),
            "record": Record(np.zeros(2), [torch.zeros(2)]),
        }
        for i in range(20)
    ]


def said(data: list[Sample]) -> list[str]:
    """The samples in words, without the addresses of images."""
    return [f"{re.sub('0x[0-9A-F]+', '', repr(each))} {each['target']['pair'][1].getpixel((0, 0))}" for each in data]


def change(sample: Sample) -> Sample:
    """Write to everything that a sample holds."""
    for name in ("x", "tensor", "half", "same"):
        sample[name] += 1
    target = sample["target"]
    target["boxes"] += 1
    target["names"].append("b")
    target["pair"][0].add_(1)
    target["pair"][1].putpixel((0, 0), 255)
    named, record = sample["named"], sample["record"]
    for each in (named.x, named.more["x"], record.x, record.more[0]):
        each += 1
    flat = {name: sample[name] for name in ("x", "tensor", "half", "same")}
    return {**flat, "boxes": target["boxes"], "names": len(target["names"]), "first": target["pair"][0]}


def change_batch(batch: Sample) -> Sample:
    made = [change({name: column[i] for name, column in batch.items()}) for i in range(len(batch["x"]))]
    return {name: [row[name] for row in made] for name in made[0]}


def change_and_yield(sample: Sample) -> Iterator[Sample]:
    yield change(sample)


PIPELINES: dict[str, Any] = {
    "sample": lambda data: from_torch(data, change, per_sample=True),
    "batch": lambda data: from_torch(data, change_batch),
    "generator": lambda data: from_torch(data, change_and_yield),
    "collate_fn": lambda data: from_torch(data, change, per_sample=True, collate_fn=list),
    "made there": lambda data: from_torch(lambda: data, change, per_sample=True),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_transform_that_writes_to_its_samples_leaves_the_data_set_alone(kind: str) -> None:
    data = kept()
    before = said(data)
    pipeline: Pipeline = PIPELINES[kind](data)
    stream = stream_of(pipeline)
    first, second = ({i: repr(row) for i, row in a_pass(stream).items()} for _ in range(2))
    assert first == second
    assert said(data) == before


def test_every_sample_is_changed_once() -> None:
    data = kept()
    rows = a_pass(stream_of(from_torch(data, change, per_sample=True), shuffle=False))
    assert [(rows[i]["x"][0], rows[i]["tensor"][0], rows[i]["same"][0]) for i in range(20)] == [
        (i + 1, i + 1, 1) for i in range(20)
    ]
    assert all((row["names"], row["first"].tolist()) == (2, [1, 1]) for row in rows.values())
