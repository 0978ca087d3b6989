"""The law of offload.DataLoader: batch for batch and element for element what torch's DataLoader yields."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.loader.job import session as sessions
from tests.loader.same import same

pytestmark = pytest.mark.usefixtures("loader_engine")


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    sessions.end_unused()


class Pair(NamedTuple):
    first: Any
    second: Any


# -- samples of many kinds, each a function of its index --------------------------------------------------------------


def image(i: int) -> Any:
    return torch.full((3, 5, 4), i % 251, dtype=torch.uint8), i % 7


def nested(i: int) -> Any:
    views = [torch.full((2, 3), float(i)), torch.full((2, 3), -float(i))]
    return {"views": views, "meta": {"id": i, "name": f"n{i}"}, "pair": Pair(i, np.float32(i))}


def ragged(i: int) -> Any:
    return {"tokens": list(range(i % 5)), "boxes": torch.ones(i % 4, 4) * i, "caption": "c" * (i % 3)}


def odd_types(i: int) -> Any:
    return {
        "bf16": torch.full((2,), float(i), dtype=torch.bfloat16),
        "complex": torch.tensor([complex(i, -i)]),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor(i % 2 == 0),
        "bytes": bytes([i % 256]),
        "last": torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(i)).to(
            memory_format=torch.channels_last
        )[0],
    }


def number(i: int) -> Any:
    return float(i)


def large(i: int) -> Any:
    return torch.full((200, 100), float(i)), np.full((100, 100), i, dtype=np.int64)


KINDS = {"image": image, "nested": nested, "ragged": ragged, "odd types": odd_types, "number": number, "large": large}
RAGGED = {"ragged"}  # torch's own collate function refuses these


def keep(samples: list[Any]) -> list[Any]:
    return samples


def padded(samples: list[Any]) -> dict[str, Any]:
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["tokens"])] = torch.tensor(sample["tokens"], dtype=torch.long)
        mask[row, : len(sample["tokens"])] = True
    return {"tokens": tokens, "mask": mask, "boxes": [sample["boxes"] for sample in samples]}


class Samples(torch_data.Dataset[Any]):
    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.n = kind, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return KINDS[self.kind](i)


class InGroups(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [KINDS[self.kind](i) for i in indices]


class Stream(torch_data.IterableDataset[Any]):
    """Each of torch's workers reads its share."""

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.n = kind, n

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        part = range(self.n) if info is None else range(info.id, self.n, info.num_workers)
        for i in part:
            yield KINDS[self.kind](i)


class Blocks(torch_data.Sampler[list[int]]):
    """A batch sampler that draws from the global generators of Python and torch, and whose batches differ in size."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n).tolist()
        while order:
            size = random.randint(1, 5)
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return math.ceil(self.n / 3)


def arguments(draw: Any, kind: str, n: int) -> dict[str, Any]:
    """Arguments of a DataLoader over a map-style data set, new objects each time."""
    collate: Any = draw(st.sampled_from([keep, padded])) if kind == "ragged" else draw(st.sampled_from([None, keep]))
    how = draw(st.sampled_from(["plain", "shuffle", "generator", "weighted", "distributed", "batch_sampler", "single"]))
    common: dict[str, Any] = {"collate_fn": collate, "num_workers": draw(st.sampled_from([0, 0, 2]))}
    if how == "single":
        return {"batch_size": None, **common, "collate_fn": None}
    if how == "batch_sampler":
        return {"batch_sampler": Blocks(n), **common}
    common |= {"batch_size": draw(st.integers(1, 9)), "drop_last": draw(st.booleans())}
    if how == "weighted":
        weights = [1.0 + i % 3 for i in range(n)]
        return {"sampler": torch_data.WeightedRandomSampler(weights, n + 3), **common}
    if how == "distributed":
        sampler = torch_data.DistributedSampler(range(n), num_replicas=2, rank=1, seed=4)  # type: ignore[arg-type]
        sampler.set_epoch(draw(st.integers(0, 3)))
        return {"sampler": sampler, **common}
    generator = torch.Generator().manual_seed(11) if how == "generator" else None
    return {"shuffle": how != "plain", "generator": generator, **common}


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


@settings(max_examples=15)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.booleans())
def test_batches_are_those_of_torch(data: Any, kind: str, n: int, in_groups: bool) -> None:
    dataset = (InGroups if in_groups else Samples)(kind, n)
    named = arguments(data.draw, kind, n)
    theirs = {**copy.deepcopy(named), "num_workers": 0}
    seed_all()
    loader = torch_data.DataLoader(dataset, **theirs)
    wanted = [list(loader), list(loader)]
    seed_all()
    ours: Any = offload.DataLoader(dataset, **named)
    assert len(ours) == len(loader)
    for epoch in wanted:
        got = list(ours)
        assert len(got) == len(epoch)
        assert all(map(same, got, epoch))


@settings(max_examples=15)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.integers(1, 40))
def test_a_resumed_loader_yields_the_rest(data: Any, kind: str, n: int) -> None:
    named = arguments(data.draw, kind, n)
    seed_all()
    whole: Any = offload.DataLoader(Samples(kind, n), **copy.deepcopy(named))
    first_epoch, second_epoch = list(whole), list(whole)
    cut = data.draw(st.integers(0, len(first_epoch)))
    seed_all()
    before: Any = offload.DataLoader(Samples(kind, n), **copy.deepcopy(named))
    iterator = iter(before)
    got = [next(iterator) for _ in range(cut)]
    state = json.loads(json.dumps(before.state_dict(), allow_nan=False))
    torch.manual_seed(99)  # another process, whose generators are elsewhere
    random.seed(99)
    after: Any = offload.DataLoader(Samples(kind, n), **copy.deepcopy(named))
    after.load_state_dict(state)
    got += list(after)
    assert len(got) == len(first_epoch)
    assert all(map(same, got, first_epoch))
    assert after.state_dict()["epoch"] == 1
    assert len(second_epoch) == len(list(after)) or "batch_sampler" in named


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process without Ray. torch forks its workers, and a fork of a process with Ray's threads may find a lock held for ever."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def batches_of_torch(kind: str, n: int, named: dict[str, Any]) -> list[Any]:
    # A spawned process would spawn its own children, too, which takes seconds each.
    context = "fork" if named["num_workers"] else None
    return list(torch_data.DataLoader(Stream(kind, n), multiprocessing_context=context, **named))


@settings(max_examples=5)
@given(
    st.sampled_from(sorted(KINDS.keys() - RAGGED)),
    st.integers(0, 30),
    st.integers(1, 6),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
)
def test_iterable_data_sets_are_read_as_by_torch(
    apart: ProcessPoolExecutor, kind: str, n: int, size: int, workers: int, drop_last: bool
) -> None:
    n -= n % (size * max(workers, 1))  # otherwise torch's order depends on which worker is first to end
    named: dict[str, Any] = {"batch_size": size, "drop_last": drop_last, "num_workers": workers}
    wanted = apart.submit(batches_of_torch, kind, n, named).result(600)
    got = list(offload.DataLoader(Stream(kind, n), **named))
    assert len(got) == len(wanted)
    assert all(map(same, got, wanted))
