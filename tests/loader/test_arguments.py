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
from offload.loader.state.epoch_progress import too_few
from offload.pipeline.preprocessing.worker_role import in_role


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
        if info is not None:
            random.Random(info.seed).shuffle(share)
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


class Early(torch_data.Sampler[list[int]]):
    """A batch sampler that draws its whole order at once."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n).tolist()
        return iter([order[i : i + 2] for i in range(0, self.n, 2)])


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
        recipe = plan.recipe
        for order in plan.orders:
            indices = order.indices if recipe.batches else [order.indices]
            yield [(int(recipe.dataset[i]), order.seed, order.first + place) for place, i in enumerate(indices)]

    def _of_iterable(self, plan: Any) -> Iterator[list[Any]]:
        shares, recipe = [], plan.recipe
        for worker in range(plan.workers):
            with in_role(worker, recipe.num_workers, recipe.seed, recipe.dataset):
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
        patch.setattr(loader_module.DataLoader, "_fetcher", lambda *_: None)
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
            named: dict[str, Any] = {"num_replicas": np.int64(arguments["replicas"]), "seed": arguments["sampler_seed"]}
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


def listed(samples: Any) -> list[Any]:
    return samples if isinstance(samples, list) else [samples]


def loader_of(arguments: Mapping[str, Any]) -> Any:
    n, workers, data = arguments["n"], arguments["num_workers"], arguments["data"](arguments["n"])
    named: dict[str, Any] = {"seed": arguments["seed"], "num_workers": workers, "collate_fn": listed}
    named["persistent_workers"] = arguments["persistent_workers"] and workers > 0
    if arguments["generator"]:
        named["generator"] = torch.Generator().manual_seed(5)
    if isinstance(data, Numbers) and (batches := {"blocks": Blocks, "early": Early}.get(arguments["order"])):
        return offload.DataLoader(data, batch_sampler=batches(n), **named)
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


@settings(max_examples=150)
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


@settings(max_examples=40)
@given(st.fixed_dictionaries(ARGUMENTS), st.fixed_dictionaries(ARGUMENTS), st.sampled_from(sorted(WAYS)), st.booleans())
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


BASE: dict[str, Any] = {
    "n": 12,
    "batch_size": 2,
    "drop_last": False,
    "num_workers": 2,
    "persistent_workers": False,
    "seed": None,
    "data": Numbers,
    "order": "plain",
    "replicas": 1,
    "sampler_seed": 0,
    "generator": False,
}


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"data": Stream}, {"num_workers": 3}, ("num_workers=2", "num_workers=3")),
        ({"data": Stream, "num_workers": 0}, {"num_workers": 1}, ("num_workers=0", "num_workers=1")),
        ({"data": Stream}, {"batch_size": 3}, ("batch_size=2", "batch_size=3")),
        ({"data": Stream}, {"drop_last": True}, ("drop_last=False", "drop_last=True")),
        ({"data": Stream}, {"seed": 1}, ("seed=None", "seed=1")),
        ({"data": Stream}, {"data": Numbers}, ("an iterable data set", "a map-style data set")),
        ({"data": Counted}, {"n": 14}, ("12 samples", "14 samples")),
        ({}, {"n": 14}, ("12 samples", "14 samples")),
        ({}, {"batch_size": None}, ("batch_size=2", "batch_size=None")),
        ({}, {"drop_last": True}, ("drop_last=False", "drop_last=True")),
        ({}, {"seed": 1}, ("seed=None", "seed=1")),
        ({"order": "shuffle"}, {"order": "plain"}, (r"a RandomSampler \(shuffle=True\)", r"a SequentialSampler \(shuffle")),
        ({"order": "shuffle"}, {"generator": True}, ("generator=None", "generator=torch.Generator")),
        ({"order": "blocks"}, {"order": "plain"}, ("batch_size=None", "batch_size=2")),
        ({"order": "distributed"}, {"replicas": 2}, ("num_replicas=1 in its sampler", "num_replicas=2 in its sampler")),
        ({"order": "distributed"}, {"sampler_seed": 1}, ("seed=0 in its sampler", "seed=1 in its sampler")),
    ],
)  # fmt: skip
def test_an_argument_that_differs_is_named_with_both_values(
    one: dict[str, Any], other: dict[str, Any], named: tuple[str, str]
) -> None:
    state = read(loader_of({**BASE, **one}), 0, 2)[1]
    loader = loader_of({**BASE, **one, **other})
    loader.load_state_dict(state)
    before, after = named
    with pytest.raises(ConfigError, match=rf"with {before}.*, and this loader has {after}.*Resume with {before}"):
        iter(loader)


@given(st.permutations(range(5)), st.permutations(range(5)), st.integers(1, 5))
def test_a_list_of_indices_must_begin_as_it_did(one: list[int], other: list[int], cut: int) -> None:
    state = read(offload.DataLoader(Numbers(5), sampler=one, seed=1), 0, cut)[1]  # type: ignore[arg-type]
    loader: Any = offload.DataLoader(Numbers(5), sampler=other, seed=1)
    loader.load_state_dict(state)
    if one[:cut] == other[:cut]:
        assert [batch[0][0] for batch in loader] == other[cut:]
    else:
        with pytest.raises(ConfigError, match=f"taken after {cut} batches of an epoch, and the sampler gives other"):
            iter(loader)


def test_a_sampler_with_random_numbers_of_its_own_is_refused_in_its_second_epoch() -> None:
    state = read(loader_of({**BASE, "order": "own"}), 1, 2)[1]
    loader = loader_of({**BASE, "order": "own"})
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"the sampler gives other batches now.*needs a state_dict"):
        iter(loader)


def test_an_iterable_data_set_that_has_shrunk_does_not_end_silently() -> None:
    state = read(loader_of({**BASE, "data": Stream}), 0, 5)[1]
    loader = loader_of({**BASE, "data": Stream, "n": 6})
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="taken after 5 batches of an epoch, and the data set gives 4 now"):
        list(loader)


def test_a_data_set_whose_order_is_that_of_its_epoch_gets_the_epoch_of_the_state() -> None:
    data = Epochs(6)
    data.set_epoch(2)
    got, state = read(offload.DataLoader(data, batch_size=2, num_workers=1), 0, 1)
    loader: Any = offload.DataLoader(Epochs(6), batch_size=2, num_workers=1)
    loader.load_state_dict(state)
    assert got[0] + list(loader) == [[2, 3], [4, 5], [0, 1]]


# -- ranks --------------------------------------------------------------------------------------------------------------


def at_rank(patch: pytest.MonkeyPatch, rank: int, world_size: int = 2) -> None:
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(world_size))


def of_rank(rank: int, n: int = 12, **named: Any) -> Any:
    sampler = torch_data.DistributedSampler(range(n), num_replicas=2, rank=rank)  # type: ignore[arg-type]
    return offload.DataLoader(Numbers(n), batch_size=2, sampler=sampler, **named)


@pytest.mark.parametrize("seed", [None, 3])
def test_all_ranks_may_load_the_state_of_one_whose_order_takes_no_random_numbers(
    monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    wanted, states, rest = [], [], []
    for rank in range(2):
        at_rank(monkeypatch, rank)
        wanted.append(epochs_of(of_rank(rank, seed=seed), 1)[0])
        states.append(read(of_rank(rank, seed=seed), 0, 2)[1])
    for rank in range(2):
        at_rank(monkeypatch, rank)
        elsewhere()
        loader = of_rank(rank, seed=seed)
        loader.load_state_dict(states[0])
        rest.append(list(loader))
        # From then on the rank has a state of its own.
        again = of_rank(rank, seed=seed)
        again.load_state_dict(read(again, 0, 1)[1])
        assert len(list(again)) == 2
    assert rest == [batches[2:] for batches in wanted]


def test_the_state_of_another_replica_is_refused_within_a_rank() -> None:
    state = read(of_rank(0), 0, 1)[1]
    loader = of_rank(1)
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"with rank=0 in its sampler, and this loader has rank=1"):
        iter(loader)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"order": "shuffle"}, True),
        ({"order": "early"}, True),
        ({"order": "tells"}, True),
        ({"order": "plain"}, False),
        ({"order": "list"}, False),
        ({"data": Stream}, True),
        ({"data": Stream, "seed": 1}, False),
        ({"data": Counted, "seed": 1}, False),
    ],
    ids=str,
)
def test_the_state_of_another_rank_is_refused_if_its_random_numbers_count(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], refused: bool
) -> None:
    at_rank(monkeypatch, 0)
    state = read(loader_of({**BASE, **changed}), 0, 2)[1]
    at_rank(monkeypatch, 1)
    wanted = epochs_of(loader_of({**BASE, **changed}), 1)[0]
    elsewhere()
    loader = loader_of({**BASE, **changed})
    loader.load_state_dict(state)
    if refused:
        with pytest.raises(ConfigError, match="was taken at rank 0, and this is rank 1"):
            iter(loader)
    else:
        assert list(loader) == wanted[2:]


def test_a_job_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    at_rank(monkeypatch, 0)
    state = read(loader_of({**BASE, "data": Stream}), 0, 2)[1]
    at_rank(monkeypatch, 0, world_size=4)
    loader = loader_of({**BASE, "data": Stream})
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="with 2 ranks, and this loader has 4 ranks"):
        iter(loader)


# -- states of other releases, and damaged ones -------------------------------------------------------------------------


def written_by_version_1(loader: Any, batches: int) -> dict[str, Any]:
    """The state after some batches of a first epoch, as releases wrote it that wrote tensors."""
    seed_all()
    kind, words, position, has_gauss, gauss = np.random.get_state()
    samplers = []
    for sampler in (loader.sampler, loader.batch_sampler):
        own = getattr(sampler, "generator", None)
        samplers.append({} if own is None else {"generator": own.get_state()})
        if hasattr(sampler, "state_dict"):
            samplers[-1]["own"] = sampler.state_dict()
    start = {
        "python": random.getstate(),
        "numpy": [kind, words.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "generator": None if loader.generator is None else loader.generator.get_state(),
        "samplers": samplers,
        "drawn": None,
    }
    return {"version": 1, "epoch": 0, "batches": batches, "start": start}


@pytest.mark.parametrize("order", ["shuffle", "sampler", "distributed", "weighted", "blocks", "tells"])
@pytest.mark.parametrize("generator", [True, False])
def test_a_state_of_version_1_is_resumed(order: str, generator: bool) -> None:
    arguments = {**BASE, "order": order, "generator": generator}
    wanted = epochs_of(loader_of(arguments), 1)[0]
    state = written_by_version_1(loader_of(arguments), 2)
    elsewhere()
    loader = loader_of(arguments)
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    again = loader_of(arguments)
    again.load_state_dict(WAYS["json"](loader.state_dict()))
    assert list(loader) == list(again) == wanted[2:]


def test_a_state_of_version_1_between_two_epochs_is_resumed() -> None:
    arguments = {**BASE, "order": "shuffle", "generator": True, "seed": 1}
    whole, loader = loader_of(arguments), loader_of(arguments)
    list(whole)
    generator = {"generator": whole.generator.get_state()}
    between = {**generator, "samplers": [generator, {}], "drawn": 3}
    loader.load_state_dict({"version": 1, "epoch": 1, "batches": 0, "start": None, "between": between})
    assert list(loader) == list(whole)


def test_a_state_of_version_1_tells_that_there_was_a_generator() -> None:
    state = written_by_version_1(loader_of({**BASE, "generator": True}), 2)
    loader = loader_of(BASE)
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"generator=torch\.Generator, and this loader has generator=None"):
        iter(loader)


def damaged(state: Any, *path: Any, value: Any) -> Any:
    state = WAYS["json"](state)
    inner = state
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 3),
        (("batches",), -1),
        (("epoch",), None),
        (("start",), {}),
        (("start", "random"), {}),
        (("start", "random", "torch", "content"), ""),
        (("start", "random", "numpy", "state"), 1),
        (("start", "drawn"), "1"),
        (("start", "samplers"), 3),
        (("start", "samplers", 0, "generator"), {"__offload_json__": "octets", "content": "x"}),
        (("arguments",), 3),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_when_it_is_loaded(path: tuple[Any, ...], value: Any) -> None:
    state = read(loader_of({**BASE, "order": "sampler"}), 0, 2)[1]
    with pytest.raises(ConfigError, match="state"):
        loader_of(BASE).load_state_dict(damaged(state, *path, value=value))


def test_the_state_of_another_generator_is_refused() -> None:
    state = read(loader_of({**BASE, "generator": True}), 0, 2)[1]
    short = damaged(state, "start", "generator", value={"__offload_json__": "octets", "content": ""})
    loader = loader_of({**BASE, "generator": True})
    loader.load_state_dict(short)
    with pytest.raises(ConfigError, match="does not fit the generator on cpu"):
        iter(loader)


class Objects(Private):
    """Its state is an object."""

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]


def test_a_sampler_whose_state_is_an_object_is_resumed_from_a_pickle() -> None:
    whole: Any = offload.DataLoader(Numbers(8), sampler=Objects(8), seed=1)
    wanted = epochs_of(whole)[1]
    got, state = read(offload.DataLoader(Numbers(8), sampler=Objects(8), seed=1), 1, 3)
    loader: Any = offload.DataLoader(Numbers(8), sampler=Objects(8), seed=1)
    loader.load_state_dict(WAYS["pickle"](state))
    assert got[1] + list(loader) == wanted
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(state)
