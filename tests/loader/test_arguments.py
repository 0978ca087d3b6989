"""A state in the middle of an epoch is resumed exactly, or refused: whatever arguments the resuming loader has.

A fake iteration makes the batches in this process. tests/loader/test_behaviour.py resumes on a real cluster.
"""

from __future__ import annotations

import io
import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.errors import ConfigError
from offload.loader import loader as loader_module
from offload.loader import session as sessions
from offload.loader.progress import too_few
from offload.pipeline.worker_role import in_role


class Numbers(torch_data.Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return i


class Stream(torch_data.IterableDataset[Any]):
    """Each worker reads its share, in an order of its seed."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        share = list(range(self.n) if info is None else range(info.id, self.n, info.num_workers))
        random.Random(None if info is None else info.seed).shuffle(share) if info is not None else None
        return iter(share)


class Counted(Stream):
    def __len__(self) -> int:
        return self.n


class Epochs(Stream):
    """Its order is that of its epoch, which the program sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([(i + self.epoch) % self.n for i in range(self.n)])


class Blocks(torch_data.Sampler[list[int]]):
    """A batch sampler of another size for each batch, which it draws as it goes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n).tolist()
        while order:
            size = random.randint(1, 4)
            yield order[:size]
            order = order[size:]


class Private(torch_data.Sampler[int]):
    """Its random numbers are its own, and its state is nobody's."""

    def __init__(self, n: int) -> None:
        self.n, self.draws = n, np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.permutation(self.n).tolist())


class Telling(Private):
    """It tells its state, with an array, a tensor and a tuple."""

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.bit_generator.state, "sizes": (np.arange(2), torch.eye(2)), 3: {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        array, tensor = state["sizes"]
        assert (array.tolist(), tensor.tolist(), state[3]) == ([0, 1], [[1, 0], [0, 1]], {1, 2})
        self.draws.bit_generator.state = state["draws"]


class InThisProcess:
    """The iteration of a loader without a cluster. A sample of a map-style data set comes with what its random numbers depend on."""

    def __init__(self, plan: Any, session: object, progress: Any, clock: object) -> None:
        self._progress = progress
        self._batches = self._of_map(plan) if plan.orders is not None else self._of_iterable(plan)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (batch := next(self._batches, None)) is None:
            self._progress.over = True
            raise StopIteration
        self._progress.batches += 1
        return batch

    def _of_map(self, plan: Any) -> Iterator[list[Any]]:
        (recipe,) = plan.recipes
        for order in plan.orders:
            indices = order.indices if recipe.batches else [order.indices]
            yield [(int(recipe.dataset[i]), order.seed, order.first + place) for place, i in enumerate(indices)]

    def _of_iterable(self, plan: Any) -> Iterator[list[Any]]:
        shares = []
        for recipe in plan.recipes:
            with in_role(recipe.worker, recipe.num_workers, recipe.seed, recipe.dataset):
                samples = list(recipe.dataset)
            size = recipe.batch_size or 1
            share = [samples[i : i + size] for i in range(0, len(samples), size)]
            shares.append([each for each in share if len(each) == size or not recipe.drop_last])
        turns = max(map(len, shares))
        made = [share[turn] for turn in range(turns) for share in shares if turn < len(share)]
        if len(made) < plan.skip:
            raise too_few(plan.skip, "data set", len(made))
        yield from made[plan.skip :]


@pytest.fixture(scope="module", autouse=True)
def _without_a_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "Iteration", InThisProcess)
        patch.setattr(sessions.User, "session", lambda *_: None)
        yield


# How a state travels: as JSON, as a checkpoint that torch loads safely, and pickled.
def through_torch(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    "json": lambda state: json.loads(json.dumps(state, allow_nan=False)),
    "torch": through_torch,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}

ARGUMENTS: dict[str, Any] = {
    "n": st.integers(1, 12),
    "batch_size": st.sampled_from([None, 1, 2, 3]),
    "drop_last": st.booleans(),
    "num_workers": st.integers(0, 3),
    "persistent_workers": st.booleans(),
    "seed": st.sampled_from([None, 0, 1]),
    "data": st.sampled_from([Numbers, Numbers, Numbers, Stream, Counted]),
    "order": st.sampled_from(["plain", "shuffle", "sampler", "distributed", "list", "weighted", "blocks", "own", "tells"]),
    "replicas": st.integers(1, 2),
    "sampler_seed": st.integers(0, 1),
    "generator": st.booleans(),
}  # fmt: skip
FREE = {"num_workers", "persistent_workers"}  # of a map-style data set: they change nothing about its batches


def order_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    n, how = arguments["n"], arguments["order"]
    generator = torch.Generator().manual_seed(7)
    match how:
        case "shuffle":
            return {"shuffle": True}
        case "sampler":
            return {"sampler": torch_data.RandomSampler(range(n), generator=generator)}
        case "distributed":
            named: dict[str, Any] = {"num_replicas": arguments["replicas"], "seed": arguments["sampler_seed"]}
            return {"sampler": torch_data.DistributedSampler(range(n), rank=0, **named)}  # type: ignore[arg-type]
        case "list":
            return {"sampler": [n - 1 - i for i in range(n)]}
        case "weighted":
            return {"sampler": torch_data.WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n)}
        case "own":
            return {"sampler": Private(n)}
        case "tells":
            return {"sampler": Telling(n)}
    return {}


def loader_of(arguments: Mapping[str, Any]) -> Any:
    n, workers, data = arguments["n"], arguments["num_workers"], arguments["data"](arguments["n"])
    named: dict[str, Any] = {"seed": arguments["seed"], "num_workers": workers}
    named["persistent_workers"] = arguments["persistent_workers"] and workers > 0
    if arguments["generator"]:
        named["generator"] = torch.Generator().manual_seed(5)
    if isinstance(data, Numbers) and arguments["order"] == "blocks":
        return offload.DataLoader(data, batch_sampler=Blocks(n), **named)
    named["batch_size"] = arguments["batch_size"]
    named["drop_last"] = arguments["drop_last"] and arguments["batch_size"] is not None
    if isinstance(data, Numbers):
        named |= order_of(arguments)
    return offload.DataLoader(data, **named)


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def epochs_of(loader: Any, count: int = 2) -> list[list[Any]]:
    seed_all()
    return [list(loader) for _ in range(count)]


def read(loader: Any, epochs: int, batches: int) -> tuple[list[Any], Any]:
    """What a program gets from so many whole epochs, and batches of the next one; and the loader's state then."""
    seed_all()
    got = [list(loader) for _ in range(epochs)]
    iterator = iter(loader)
    got.append([next(iterator) for _ in range(batches)])
    return got, loader.state_dict()


def elsewhere() -> None:
    """Another process's generators are elsewhere."""
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)


@settings(max_examples=300)
@given(st.data(), st.fixed_dictionaries(ARGUMENTS), st.sampled_from(sorted(WAYS)), st.integers(0, 1))
def test_a_state_is_resumed_exactly_or_refused(data: Any, before: dict[str, Any], way: str, epoch: int) -> None:
    changed = data.draw(st.sets(st.sampled_from(sorted(ARGUMENTS)), max_size=2), label="changed")
    after = {name: data.draw(ARGUMENTS[name]) if name in changed else value for name, value in before.items()}
    if Stream in (before["data"], after["data"]):
        after["n"] = before["n"]  # nobody sees that a stream without a length has another one
    wanted = epochs_of(loader_of(before))[epoch]
    if not wanted:
        return
    got, state = read(loader_of(before), epoch, data.draw(st.integers(1, len(wanted)), label="cut"))
    elsewhere()
    loader = loader_of(after)
    loader.load_state_dict(WAYS[way](state))
    assert WAYS["json"](loader.state_dict()) == WAYS["json"](state)  # a loaded state is the state
    differ = {name for name in before if before[name] != after[name]}
    try:
        rest = list(loader)
    except ConfigError:
        is_map = before["data"] is Numbers
        assert differ - (FREE if is_map else set()) or (is_map and before["order"] == "own")
        return
    assert got[-1] + rest == wanted
    assert loader.state_dict()["epoch"] == epoch + 1


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(ARGUMENTS), st.fixed_dictionaries(ARGUMENTS), st.sampled_from(sorted(WAYS)), st.booleans()
)
def test_between_two_epochs_all_arguments_may_change(
    before: dict[str, Any], after: dict[str, Any], way: str, begun: bool
) -> None:
    state = read(loader_of(before), 0, 0)[1]
    if not begun:
        finished = loader_of(before)
        list(finished)
        state = finished.state_dict()
    whole = sorted(len(batch) for batch in epochs_of(loader_of(after), 1)[0])
    loader = loader_of(after)
    loader.load_state_dict(WAYS[way](state))
    got = list(loader)
    samples = [sample[0] if after["data"] is Numbers else sample for batch in got for sample in batch]
    if after["order"] != "weighted" or after["data"] is not Numbers:
        assert len(set(samples)) == len(samples) or after["order"] == "distributed"
    assert sum(map(len, got)) == sum(whole)
