"""A torch DataLoader describes a data set of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import offload
from offload.errors import ConfigError
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.describe.from_loader import described
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.index.rows import rows_at
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.watchdog import NoReports, Watch


class Squares(Dataset[tuple[int, float]]):
    """Pairs of a number and its square."""

    def __init__(self, samples: int = 24) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, float(i**2)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Reversed(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(24)))

    def __len__(self) -> int:
        return 24


class Repeated(DistributedSampler[Any]):
    """Repeats each sample, as for repeated augmentation."""

    def __iter__(self) -> Iterator[Any]:
        return (i for i in super().__iter__() for _ in range(3))


def visited(pipeline: Pipeline, epoch: int = 0) -> list[int]:
    """The samples of an epoch in the order of the index: what a pass visits before it shuffles."""
    assert pipeline.list is not None
    index = pipeline.list()
    if index.draws is not None:
        return [int(place) for place in index.draws.order(seed=0, epoch=epoch)]
    taken = pipeline.recipe(index, seed=0)
    assert taken.reader is not None
    rows = rows_at(index.rows, np.arange(len(index)))
    return [sample[0] for (sample,) in next(iter(taken.reader.read(rows).columns.values()))]


@given(batch_size=st.integers(1, 24), drop_last=st.booleans(), shuffle=st.booleans())
def test_a_loader_tells_batches_and_order(batch_size: int, drop_last: bool, shuffle: bool) -> None:
    loader = DataLoader(Squares(), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    pipeline = described("train", loader)
    assert (pipeline.batch_size, pipeline.drop_last, pipeline.shuffle) == (batch_size, drop_last, shuffle)
    assert pipeline.collate_fn is default_collate
    assert visited(pipeline) == list(range(24))


@given(indices=st.lists(st.integers(0, 23), min_size=1, unique=True))
def test_a_subset_keeps_its_samples(indices: list[int]) -> None:
    pipeline = described("train", DataLoader(Squares(), sampler=SubsetRandomSampler(indices)))
    assert (visited(pipeline), pipeline.shuffle) == (indices, True)


@given(weights=st.lists(st.sampled_from([0.0, 1.0]), min_size=24, max_size=24).filter(any), samples=st.integers(1, 60))
def test_weights_are_drawn_as_often_as_the_sampler_draws(weights: list[float], samples: int) -> None:
    sampler = WeightedRandomSampler(weights, samples)
    pipeline = described("train", DataLoader(Squares(), sampler=sampler))
    drawn = visited(pipeline)
    assert pipeline.drawn
    assert len(drawn) == samples
    assert all(weights[place] for place in drawn)


def test_a_sampler_with_replacement_draws() -> None:
    sampler = RandomSampler(Squares(), replacement=True, num_samples=100)
    assert len(visited(described("train", DataLoader(Squares(), sampler=sampler)))) == 100


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_feed_divides_what_a_distributed_sampler_would(shuffle: bool) -> None:
    sampler = DistributedSampler(Squares(), num_replicas=2, rank=1, shuffle=shuffle)
    pipeline = described("train", DataLoader(Squares(), batch_size=3, sampler=sampler))
    assert (visited(pipeline), pipeline.shuffle) == (list(range(24)), shuffle)
    assert pipeline.batch_size == 6  # the replicas' together


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (lambda: DataLoader(Endless()), "datasets['val'] is a DataLoader over the iterable data set Endless"),
        (lambda: DataLoader(Squares(), batch_size=None), "datasets['val'] is a DataLoader with batch_size=None"),
        (
            lambda: DataLoader(Squares(), batch_sampler=[[0, 1], [2]]),
            "datasets['val'] is a DataLoader with the batch sampler list",
        ),
        (
            lambda: DataLoader(Squares(), sampler=Reversed()),
            "datasets['val'] is a DataLoader with the sampler Reversed",
        ),
        (
            lambda: DataLoader(Squares(), sampler=Repeated(Squares(), num_replicas=1, rank=0)),
            "with the sampler Repeated",
        ),
        (
            lambda: DataLoader(Squares(), sampler=SequentialSampler(range(7))),
            "with the sampler SequentialSampler with these options",
        ),
        (
            lambda: DataLoader(Squares(), sampler=RandomSampler(range(7), replacement=True)),
            "with the sampler RandomSampler with these options",
        ),
        (
            lambda: DataLoader(Squares(), sampler=DistributedSampler(Squares(9), num_replicas=1, rank=0)),
            "with the sampler DistributedSampler with these options",
        ),
        (
            lambda: DataLoader(Squares(), sampler=RandomSampler(Squares(), num_samples=7)),
            "with the sampler RandomSampler with these options",
        ),
        (
            lambda: DataLoader(Squares(), sampler=WeightedRandomSampler([1.0] * 24, 5, replacement=False)),
            "with the sampler WeightedRandomSampler with these options",
        ),
    ],
)
def test_orders_that_a_run_cannot_follow_are_refused(loader: Any, found: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        described("val", loader())
    assert found in str(refusal.value)
    assert "offload.DataLoader" in str(refusal.value) or "Pass batch_size" in str(refusal.value)


def test_a_batch_sampler_of_torchs_own_kind_is_what_a_loader_makes_itself() -> None:
    loader = DataLoader(Squares(), batch_sampler=BatchSampler(RandomSampler(Squares()), 5, drop_last=True))
    pipeline = described("train", loader)
    assert (pipeline.batch_size, pipeline.drop_last, pipeline.shuffle) == (5, True, True)


def numbered(rows: pa.Table) -> pa.Table:
    numbers = pa.array(range(len(rows)), pa.int64())
    return rows.append_column(SAMPLE_ID, numbers).append_column(POSITION, numbers)


def train(ctx: Any) -> None:
    raise AssertionError


def test_the_trainer_takes_the_batch_size_of_the_training_loader() -> None:
    loaders = {"train": DataLoader(Squares(), batch_size=6), "val": DataLoader(Squares(), batch_size=24)}
    assert offload.Trainer(train, datasets=loaders).batch_size.initial == 6
    assert offload.Trainer(train, datasets=loaders, batch_size=4).batch_size.initial == 4
    with pytest.raises(ConfigError, match="needs batch_size, the global batch"):
        offload.Trainer(train, datasets={"train": Squares(), "val": loaders["val"]})


def test_each_process_initialises_itself_once_before_it_reads() -> None:
    roles: list[Any] = []

    def begin(number: int) -> None:
        roles.append((number, get_worker_info()))

    alone = described(
        "train", DataLoader(Squares(), batch_size=4, worker_init_fn=begin)
    )  # for torch, too, only workers call it
    assert alone.list is not None
    alone.recipe(alone.list(), seed=0).ready()
    pipeline = described("train", DataLoader(Squares(), batch_size=4, worker_init_fn=begin, num_workers=1))
    assert pipeline.list is not None
    index = pipeline.list()
    assert roles == []  # the driver only lists
    recipe = pipeline.recipe(index, seed=0).ready()
    for _ in range(2):
        recipe.process(
            numbered(rows_at(index.rows, np.arange(4))), epoch=0, scratch=Scratch(), watch=Watch(NoReports())
        )
    ((number, info),) = roles
    assert number == info.id == 0
    assert isinstance(info.dataset, Squares)


def test_an_initialisation_that_raises_is_named() -> None:
    def broken(number: int) -> None:
        raise ValueError("no licence")

    pipeline = offload.from_torch(Squares(), worker_init_fn=broken)
    assert pipeline.list is not None
    with pytest.raises(offload.RunError, match=r"worker_init_fn \(.*broken\) raised ValueError: no licence"):
        pipeline.recipe(pipeline.list(), seed=0).ready()
    with pytest.raises(ConfigError, match="from_torch: worker_init_fn"):
        offload.from_torch(Squares(), worker_init_fn=3)  # type: ignore[arg-type]


def test_an_offload_loader_keeps_what_it_does_on_the_device() -> None:
    def normalised(batch: torch.Tensor) -> torch.Tensor:
        return batch / 255

    pipeline = described("train", offload.DataLoader(Squares(), batch_size=4, on_device=normalised))
    assert pipeline.on_device == (normalised,)
