"""Behaviour that torch's own tests of its DataLoader look for, shown on offload.DataLoader. docs/dataloader-tests.md says which test of
torch each of these answers."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data as torch_data

import offload
from offload.engine import uses_ray
from offload.errors import ConfigError, RunError
from offload.loader.job import session as sessions
from tests.helpers import eventually
from tests.loader.same import same

pytestmark = pytest.mark.usefixtures("loader_engine")

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    sessions.end_unused()


def keep(samples: list[Any]) -> list[Any]:
    return samples


class Numbers(torch_data.Dataset[Any]):
    def __init__(self, n: int = 12) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return i


class Stream(torch_data.IterableDataset[Any]):
    """Each worker reads as many numbers as ``shares`` gives it; without workers, the first share."""

    def __init__(self, *shares: int) -> None:
        self.shares = shares

    def __len__(self) -> int:
        return sum(self.shares)

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        return iter(range(self.shares[0 if info is None else info.id]))


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def of_torch(dataset: Any, epochs: int = 1, **named: Any) -> list[list[Any]]:
    """The epochs of torch's loader, without workers: a fork of a process with Ray's threads may hang."""
    torch.manual_seed(8)
    alone = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
    loader = torch_data.DataLoader(dataset, **{**named, **alone})
    return [list(loader) for _ in range(epochs)]


def of_offload(dataset: Any, epochs: int = 1, **named: Any) -> list[list[Any]]:
    torch.manual_seed(8)
    loader: Any = offload.DataLoader(dataset, **named)
    return [list(loader) for _ in range(epochs)]


# -- batches ------------------------------------------------------------------------------------------------------------


def pairs() -> torch_data.TensorDataset:
    return torch_data.TensorDataset(torch.arange(26.0).view(13, 2), torch.arange(13) % 3)


WORKING = [*WORKERS, {"num_workers": 4, "prefetch_factor": 3}]
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "in pairs": lambda: {"batch_size": 2},
    "one by one": lambda: {"batch_size": None},
    "shuffled": lambda: {"shuffle": True},
    "shuffled pairs": lambda: {"shuffle": True, "batch_size": 2},
    "shuffled, one by one": lambda: {"shuffle": True, "batch_size": None},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(42)},
    "a range": lambda: {"sampler": range(2, 12), "batch_size": 2},
    "a list of tuples": lambda: {"batch_sampler": [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)]},
}


@pytest.mark.parametrize(
    ("order", "working"),
    [
        # Each way of working meets each way of drawing; the other pairs are left to `make soak`.
        pytest.param(order, working, marks=[pytest.mark.soak] if (row - column) % len(WORKING) > 1 else [])
        for row, order in enumerate(ORDERS)
        for column, working in enumerate(WORKING)
    ],
    ids=str,
)
def test_every_order_is_that_of_torch(order: str, working: dict[str, Any]) -> None:
    wanted = of_torch(pairs(), 2, **ORDERS[order]())
    got = of_offload(pairs(), 2, **ORDERS[order](), **working)
    # torch's persistent workers draw no seed in the second epoch, which a torch without workers does.
    epochs = 1 if working.get("persistent_workers") and "shuffled" in order else 2
    assert same(got[:epochs], wanted[:epochs])


@pytest.mark.parametrize("order", ["shuffled", "shuffled by a generator"])
def test_equal_seeds_give_equal_orders(order: str) -> None:
    assert same(of_offload(pairs(), **ORDERS[order]()), of_offload(pairs(), num_workers=2, **ORDERS[order]()))


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_start_methods_are_accepted(method: str) -> None:
    wanted = of_torch(Numbers(11), batch_size=3)
    for context in (method, multiprocessing.get_context(method)):
        got = of_offload(Numbers(11), batch_size=3, num_workers=3, multiprocessing_context=context, pin_memory=True)
        assert same(got, wanted)


class ManyAtOnce(Numbers):
    def __getitem__(self, indices: Any) -> Any:
        assert isinstance(indices, list)
        return torch.tensor(indices)


@pytest.mark.parametrize("working", WORKERS, ids=str)
def test_a_sampler_may_give_lists_of_indices_without_batches(working: dict[str, Any]) -> None:
    named: dict[str, Any] = {"batch_size": None, "sampler": [[4, 0, 3], [1], [2, 5]]}
    assert same(of_offload(ManyAtOnce(), **named, **working), of_torch(ManyAtOnce(), **named))


def test_two_loaders_take_turns() -> None:
    one, two = (
        iter(offload.DataLoader(Numbers(), batch_size=2, **working)) for working in ({"num_workers": 1}, WORKERS[2])
    )
    turns = [next(one), next(one), next(two), next(two), next(one), next(two)]
    assert plain(turns) == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [4, 5]]


class Batch(NamedTuple):
    pair: Any
    name: str
    noise: Any


class Pair(NamedTuple):
    plus: Any
    minus: Any


class Named(Numbers):
    def __getitem__(self, i: int) -> Any:
        return Batch(Pair(i, -i), f"n{i}", torch.full((3,), float(i)))


class Dicts(Numbers):
    def __getitem__(self, i: int) -> Any:
        return {"values": torch.full((4, 2), float(i)), "inner": {"number": i}}


class Arrays(Numbers):
    def __getitem__(self, i: int) -> Any:
        return np.ones((2, 3, 4)) * i


@pytest.mark.parametrize("working", WORKERS, ids=str)
@pytest.mark.parametrize("dataset", [Named(4), Dicts(4), Arrays(30)], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("size", [2, None])
def test_structures_keep_their_types(dataset: Any, size: int | None, working: dict[str, Any]) -> None:
    got = of_offload(dataset, batch_size=size, **working)
    assert same(got, of_torch(dataset, batch_size=size))


class Row(list[Any]):
    pass


class Record(dict[str, Any]):
    pass


def mapped(folder: Path) -> list[Any]:
    np.save(folder / "rows.npy", np.arange(8).reshape(4, 2))
    return list(np.load(folder / "rows.npy", mmap_mode="c"))  # torch warns of arrays that are read-only


SAMPLES: dict[str, Callable[[Path], list[Any]]] = {
    "whole numbers": lambda _: [1, 2, -1],
    "fractions": lambda _: [1.5, 2.25, -0.5],
    "truth values": lambda _: [True, False],
    "texts": lambda _: ["a", "b", "c"],
    "texts of NumPy": lambda _: list(np.array(["a", "b", "c"])),
    "dicts of a class": lambda _: [Record(a=1, b=2), Record(a=3, b=4)],
    "lists of a class": lambda _: [Row([1, 2, 3]), Row([4, 5, 6])],
    "ranges": lambda _: [range(2), range(2)],
    "rows of a memory-mapped file": mapped,
    **{
        f"scalars of NumPy, {kind}": lambda _, kind=kind: [np.dtype(kind).type(3)] * 4  # type: ignore[misc]
        for kind in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
    },
}


@pytest.mark.parametrize("size", [2, None])
def test_samples_are_collated_and_converted_as_by_torch(size: int | None, tmp_path: Path) -> None:
    """One data set holds samples of all kinds, and a batch those of one kind."""
    samples: list[Any] = []
    batches: list[list[int]] = []
    kinds: list[str] = []
    for kind, made in SAMPLES.items():
        indices = range(len(samples), len(samples) + len(rows := made(tmp_path)))
        parts = [list(indices[at : at + (size or 1)]) for at in range(0, len(rows), size or 1)]
        samples += rows
        batches += parts
        kinds += [kind] * len(parts)
    named: dict[str, Any] = {"batch_sampler": batches} if size else {"batch_size": None}
    (got,), (wanted,) = of_offload(samples, num_workers=1, **named), of_torch(samples, **named)
    assert len(got) == len(wanted) == len(kinds)
    for kind, ours, theirs in zip(kinds, got, wanted, strict=True):
        assert same(ours, theirs), kind


@pytest.mark.parametrize(
    "samples",
    [
        [["x"], ["x", "x"]],
        [["x", "x"], ["x"]],
        [np.array(["a", "b"])] * 2,
        [np.array([object()])] * 2,
    ],
    ids=["ragged", "ragged the other way", "arrays of text", "arrays of objects"],
)
def test_what_torch_cannot_collate_is_refused_with_its_error(samples: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        of_torch(samples, batch_size=2)
    with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value))):
        of_offload(samples, batch_size=2, num_workers=1)


def test_collated_tensors_are_not_moved_to_torchs_shared_memory() -> None:
    def shared(samples: list[Any]) -> Any:
        return torch_data.default_collate(samples).is_shared()

    # torch's own workers would say True: they hand tensors over in shared memory, as Ray's object store does here.
    assert list(offload.DataLoader([torch.zeros(1)], collate_fn=shared, num_workers=1)) == [False]
    assert list(offload.DataLoader([np.zeros(1)], collate_fn=shared, num_workers=1)) == [False]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_travel_and_are_not_collated() -> None:
    samples = [torch.nested.nested_tensor([torch.full((i + 1,), float(i))]) for i in range(4)]
    got = list(offload.DataLoader(samples, collate_fn=keep, num_workers=2))
    assert all(torch.equal(batch[0][0], sample[0]) for batch, sample in zip(got, samples, strict=True))
    with pytest.raises(RuntimeError, match="not currently supported by the default collate_fn"):
        next(iter(offload.DataLoader(samples, num_workers=2)))


class Convolved(Numbers):
    def __init__(self) -> None:
        super().__init__(1)
        self.x = torch.ones(1, 1, 24_000)
        self[0]  # the program convolves before the workers do

    def __getitem__(self, i: int) -> Any:
        return torch.nn.functional.conv1d(self.x, torch.ones(1, 1, 2))


def test_the_threads_of_the_program_do_not_disturb_workers() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert same(of_offload(Convolved(), num_workers=1), of_torch(Convolved()))
    finally:
        torch.set_num_threads(before)


def test_kept_batches_open_no_files() -> None:
    class Filled(Numbers):
        def __getitem__(self, i: int) -> Any:
            return torch.full((20_000,) if i % 4 == 0 else (2, 2), float(i))

    loader = offload.DataLoader(Filled(400), num_workers=1)
    next(iter(loader))  # connects to Ray
    before = len(os.listdir("/proc/self/fd"))
    kept = list(loader)
    assert len(kept) == 400
    assert len(os.listdir("/proc/self/fd")) - before < 100


# -- lengths, samplers, arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_lengths_are_torchs_and_are_kept(size: int, drop_last: bool) -> None:
    for dataset in (Numbers(10), Stream(10)):
        loader: Any = offload.DataLoader(dataset, batch_size=size, drop_last=drop_last)
        theirs = torch_data.DataLoader(dataset, batch_size=size, drop_last=drop_last)
        assert len(loader) == len(theirs)
        if size == 3:
            assert sum(1 for _ in loader) == len(loader)
    assert len(offload.DataLoader(Stream(10), batch_size=None)) == 10


@pytest.mark.parametrize("replacement", [False, True])
def test_a_sampler_longer_than_the_data_set_sets_the_length(replacement: bool) -> None:
    dataset = Numbers(10)
    sampler = torch_data.RandomSampler(dataset, replacement=replacement, num_samples=15)
    assert [len(offload.DataLoader(dataset, batch_size=size, sampler=sampler)) for size in (1, 6)] == [15, 3]
    got = plain(offload.DataLoader(dataset, batch_size=6, sampler=sampler))
    assert [len(batch) for batch in got] == [6, 6, 3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_may_grow(shuffle: bool) -> None:
    dataset = [torch.full((4,), float(i)) for i in range(4)]
    loader: Any = offload.DataLoader(dataset, shuffle=shuffle)  # type: ignore[arg-type]
    dataset.append(torch.full((4,), 4.0))
    assert len(loader) == 5
    assert sorted(float(batch[0, 0]) for batch in loader) == [0, 1, 2, 3, 4]


def test_ranks_that_drop_the_last_batch_repeat_no_sample() -> None:
    dataset = Numbers(9)
    seen = Counter[int]()
    for rank in range(4):
        sampler: Any = torch_data.DistributedSampler(dataset, num_replicas=4, rank=rank)
        for batch in offload.DataLoader(dataset, batch_size=2, drop_last=True, sampler=sampler):
            seen.update(batch.tolist())
    assert seen.total() == 8
    assert set(seen.values()) == {1}


def test_indices_of_a_split_are_whole_numbers() -> None:
    class Strict(Numbers):
        def __getitem__(self, i: Any) -> Any:
            return type(i).__name__

    for lengths in ([5], [1.0]):
        (whole,) = torch_data.random_split(Strict(5), lengths)
        assert list(itertools.chain(*offload.DataLoader(whole))) == ["int"] * 5


@pytest.mark.parametrize("name", ["batch_size", "sampler", "batch_sampler", "drop_last", "dataset"])
@pytest.mark.parametrize("working", WORKERS, ids=str)
def test_what_torch_fixes_at_construction_is_fixed(name: str, working: dict[str, Any]) -> None:
    loader = offload.DataLoader(Numbers(), **working)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
        setattr(loader, name, {})


def refused() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Data sets and arguments that torch's constructor refuses."""
    numbers, stream = Numbers(), Stream(20)
    order = torch_data.SequentialSampler(numbers)
    batches = torch_data.BatchSampler(order, 3, False)
    yield numbers, {"num_workers": -1}
    yield numbers, {"timeout": -1}
    yield numbers, {"batch_size": None, "drop_last": True}
    yield numbers, {"num_workers": 0, "multiprocessing_context": "spawn"}
    yield numbers, {"num_workers": 1, "multiprocessing_context": "bad"}
    yield numbers, {"num_workers": 1, "multiprocessing_context": object()}
    yield numbers, {"batch_size": 11, "sampler": order, "shuffle": True}
    for shuffle in (True, 3):
        yield numbers, {"batch_sampler": batches, "sampler": order, "shuffle": shuffle}
        yield stream, {"shuffle": shuffle}
    for other in ({"batch_size": 11}, {"shuffle": True}, {"drop_last": True}, {"drop_last": 3}):
        yield numbers, {"batch_sampler": batches, **other}
    for sampler in (torch_data.SequentialSampler(numbers), 3):
        yield stream, {"sampler": sampler}
    for batch_sampler in (batches, 3):
        yield stream, {"batch_sampler": batch_sampler}


def test_all_refusals_are_torchs() -> None:
    for dataset, named in refused():
        with pytest.raises((ValueError, TypeError)) as theirs:
            torch_data.DataLoader(dataset, **named)
        with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value))):
            offload.DataLoader(dataset, **named)


def test_many_workers_are_no_reason_to_warn() -> None:
    with pytest.warns(UserWarning, match="excessive worker creation"):
        torch_data.DataLoader(Numbers(), num_workers=1000)
    assert len(offload.DataLoader(Numbers(), num_workers=1000)) == 12  # warnings are errors here


def test_annotations_may_name_what_a_loader_yields() -> None:
    def make() -> offload.DataLoader[list[torch.Tensor]]:
        return offload.DataLoader(Numbers())

    assert offload.DataLoader[list[torch.Tensor]] is not offload.DataLoader
    assert isinstance(make(), offload.DataLoader)


# -- iterable data sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "working"), [(list, {}), (tuple, {"num_workers": 1, "persistent_workers": True})])
def test_a_loader_becomes_a_list_or_a_tuple(kind: Any, working: dict[str, Any]) -> None:
    for dataset in (Numbers(6), Stream(6)):
        single = kind(offload.DataLoader(dataset, batch_size=None, **working))
        assert single == kind(range(6))
        assert all(type(number) is int for number in single)
        batches = kind(offload.DataLoader(dataset, batch_size=2, **working))
        assert same(batches, kind(of_torch(dataset, batch_size=2)[0]))


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ({"batch_size": None, "prefetch_factor": 3}, [0, 0, 1, 1, 2, 2, 3, 3, *range(4, 20)]),
        ({"batch_size": 7, "persistent_workers": True}, [[0, 1, 2, 3], [*range(7)], [*range(7, 14)], [*range(14, 20)]]),
        ({"batch_size": 7, "drop_last": True}, [[*range(7)], [*range(7, 14)]]),
    ],
    ids=str,
)
def test_workers_of_an_iterable_data_set_may_have_shares_of_any_size(named: dict[str, Any], wanted: list[Any]) -> None:
    loader: Any = offload.DataLoader(Stream(0, 4, 20), num_workers=3, **named)
    assert plain(loader) == wanted


class ByProcess(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        assert info is not None
        while True:
            yield info.id, os.getpid()


# The workers are busy when the loop leaves them: to end them must not stop the feed, which all loaders share.
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_an_iterable_data_set_take_turns_in_every_epoch_and_end(persistent: bool) -> None:
    loader: Any = offload.DataLoader(ByProcess(), batch_size=2, num_workers=2, persistent_workers=persistent)
    processes: set[int] = set()
    for _ in range(2):
        iterator = iter(loader)
        for turn in range(6):
            workers, ids = next(iterator)
            assert workers.tolist() == [turn % 2] * 2
            processes.update(ids.tolist())
        del iterator
    assert os.getpid() not in processes
    del loader  # they would wait for its next epoch
    gc.collect()
    eventually(lambda: not any(map(psutil.pid_exists, processes)))


@pytest.mark.parametrize("working", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_chained_streams_follow_each_other(working: dict[str, Any]) -> None:
    for chained in (Stream(5) + Stream(3), torch_data.ChainDataset([Stream(5), Stream(3)])):
        assert plain(offload.DataLoader(chained, **working)) == [[i] for i in [*range(5), *range(3)]]
    with pytest.raises(AssertionError, match="ChainDataset only supports IterableDataset"):
        list(offload.DataLoader(torch_data.ChainDataset([Stream(1), Numbers(1)]), **working))


class Understated(Stream):
    """More numbers than it says."""

    def __len__(self) -> int:
        return 3


def warned(loader: Any) -> list[str]:
    """What each step of an epoch warned of."""
    iterator, said = iter(loader), []
    for _ in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next(iterator)
        said.append(" ".join(str(each.message) for each in caught if each.category is UserWarning))
    return said


@pytest.mark.parametrize("working", [{}, WORKERS[2]], ids=str)
def test_more_batches_than_the_length_that_was_told_are_worth_a_warning(working: dict[str, Any]) -> None:
    theirs = torch_data.DataLoader(Understated(5, 5))
    ours = offload.DataLoader(Understated(5, 5), **working)
    assert not any(warned(theirs) + warned(ours))  # nobody has asked for the length
    assert len(ours) == len(theirs) == 3
    said = warned(ours)
    assert list(map(bool, said)) == list(map(bool, warned(theirs))) == [False, False, False, True, True]
    assert "get_worker_info" in said[-1] or not working


def test_an_affinity_that_worker_init_fn_sets_stays() -> None:
    last = max(os.sched_getaffinity(0))

    class Allowed(torch_data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            torch.randperm(1)
            return iter(os.sched_getaffinity(0))

    def settle(_: int) -> None:
        os.sched_setaffinity(0, [last])

    assert plain(offload.DataLoader(Allowed(), num_workers=2, worker_init_fn=settle)) == [[last], [last]]


class Noise(torch_data.IterableDataset[Any]):
    """Random numbers, and a state of its own, for which nobody asks."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.rand(1).item() for _ in range(5))

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    load_state_dict: Any = state_dict


@pytest.mark.parametrize("working", [WORKERS[0], pytest.param(WORKERS[1], marks=pytest.mark.soak), WORKERS[2]], ids=str)
def test_a_resumed_loader_of_an_iterable_data_set_yields_the_rest(working: dict[str, Any]) -> None:
    def make() -> Any:
        return offload.DataLoader(Noise(), batch_size=2, generator=torch.Generator().manual_seed(3), **working)

    torch.manual_seed(0)
    whole = make()
    epochs = [plain(whole), plain(whole)]
    assert epochs[0] != epochs[1] or working.get("persistent_workers", False)
    for cut in (0, 2, len(epochs[0])):
        torch.manual_seed(0)
        before, after = make(), make()
        iterator = iter(before)
        got = [next(iterator) for _ in range(cut)]
        after.load_state_dict(before.state_dict())
        assert plain([*got, *after]) == epochs[0]
        if working:  # otherwise the program's own generator decides
            assert plain(after) == epochs[1]


# -- seeds and workers ----------------------------------------------------------------------------------------------------


class Seeds(Numbers):
    def __getitem__(self, i: int) -> Any:
        return torch.initial_seed()


def seeds(**named: Any) -> list[int]:
    loader = offload.DataLoader(Seeds(), collate_fn=keep, generator=torch.Generator().manual_seed(42), **named)
    return list(itertools.chain(*loader))


@pytest.mark.parametrize("working", WORKERS, ids=str)
def test_every_sample_has_a_seed_of_its_own_that_the_generator_decides(working: dict[str, Any]) -> None:
    got = seeds(**working)
    assert len(set(got)) == 12
    assert seeds(**working) == got


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_set_can_hold_what_only_processes_of_one_parent_share_if_they_are_forked(method: str) -> None:
    class Meets(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.count = multiprocessing.get_context("spawn").Value("i", 0)

    loader: Any = offload.DataLoader(Meets(), batch_size=12, num_workers=2, multiprocessing_context=method)
    if method == "fork" and not uses_ray(None):
        assert plain(loader) == [list(range(12))]
        return
    with pytest.raises(ConfigError, match=r"Meets.*through inheritance"):
        iter(loader)


def test_a_seed_of_worker_init_fn_holds_for_iterable_data_sets_alone() -> None:
    def seed(_: int) -> None:
        torch.manual_seed(12_345)

    class Streamed(torch_data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield torch.initial_seed()

    assert plain(offload.DataLoader(Streamed(), num_workers=2, worker_init_fn=seed)) == [[12_345]] * 2
    # Each sample of a map-style data set has a seed of its own, so that it does not depend on processes.
    assert seeds(num_workers=2, worker_init_fn=seed) == seeds(num_workers=2)


class Told(Numbers):
    """Each sample is what the worker's ``worker_init_fn`` noted."""

    def __getitem__(self, i: int) -> Any:
        info = torch_data.get_worker_info()
        assert info is not None
        return self.notes[info.id]  # type: ignore[attr-defined]


def note(worker: int) -> None:
    info: Any = torch_data.get_worker_info()
    found = {"argument": worker, "id": info.id, "num_workers": info.num_workers, "seed": info.seed}
    found["initial_seed"] = torch.initial_seed()
    found["names"] = all(f"{name}=" in repr(info) for name in ("id", "num_workers", "seed", "dataset"))
    for name in ("id", "other"):
        try:
            setattr(info, name, 3)
        except Exception:
            found[f"{name} is fixed"] = True
    info.dataset.notes = {**getattr(info.dataset, "notes", {}), worker: found}


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_find_torchs_facts_and_their_own_copy_of_the_data_set(persistent: bool) -> None:
    dataset = Told(6)
    generator = torch.Generator().manual_seed(3)
    loader = offload.DataLoader(
        dataset,
        batch_size=2,
        num_workers=2,
        worker_init_fn=note,
        collate_fn=keep,
        persistent_workers=persistent,
        generator=generator,
    )
    assert torch_data.get_worker_info() is None
    got = list(itertools.chain(*loader))
    assert torch_data.get_worker_info() is None
    assert not hasattr(dataset, "notes")
    assert [each["id"] for each in got] == [0, 0, 1, 1, 0, 0]
    first = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)))
    for each in got:
        assert each["argument"] == each["id"]
        assert each["num_workers"] == 2
        assert each["seed"] == each["initial_seed"]
        assert persistent or each["seed"] == first + each["id"]
        assert each["names"]
        assert each["id is fixed"]
        assert each["other is fixed"]


class Remembers(Numbers):
    worker = -1

    def begin(self, worker: int) -> None:
        self.worker = worker

    def __getitem__(self, i: int) -> Any:
        info = torch_data.get_worker_info()
        assert info is not None
        return i, info.id, self.worker


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_go_round_the_workers_whichever_process_makes_them(workers: int) -> None:
    dataset = Remembers(24)
    loader = offload.DataLoader(dataset, batch_size=4, num_workers=workers, timeout=800, worker_init_fn=dataset.begin)
    for number, (indices, ids, remembered) in enumerate(loader):
        assert indices.tolist() == [*range(4 * number, 4 * number + 4)]
        assert ids.tolist() == [number % workers] * 4
        assert set(remembered.tolist()) <= {*range(workers)}  # the worker that began last on this process's copy


# -- errors -----------------------------------------------------------------------------------------------------------------


class Unwritten(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return 11


@pytest.mark.parametrize("working", [*WORKERS, {"num_workers": 4}], ids=str)
def test_each_batch_raises_its_own_error(working: dict[str, Any]) -> None:
    iterator = iter(offload.DataLoader(Unwritten(), batch_size=2, shuffle=True, **working))
    for _ in range(6):
        with pytest.raises(NotImplementedError):
            next(iterator)
    assert next(iterator, None) is None


class Broken(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("no stream today")


def fail(_: int) -> None:
    raise ValueError("no worker today")


@pytest.mark.parametrize("working", WORKERS, ids=str)
def test_errors_of_the_beginning_are_raised(working: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no stream today"):
        list(offload.DataLoader(Broken(), **working))
    if working:
        with pytest.raises(ValueError, match="no worker today"):
            list(offload.DataLoader(Numbers(), worker_init_fn=fail, **working))


class Crashes(Numbers):
    """Its fourth sample kills the process that makes it, unless one died of it before and ``once`` is set."""

    def __init__(self, died: Path, *, once: bool) -> None:
        super().__init__()
        self.died, self.once = died, once

    def __getitem__(self, i: int) -> Any:
        if i == 3 and not (self.once and self.died.exists()):
            self.died.touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        return i


class CrashingStream(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGSEGV)
        yield 0


def test_a_batch_whose_process_crashed_is_made_again(tmp_path: Path) -> None:
    loader = offload.DataLoader(Crashes(tmp_path / "died", once=True), batch_size=2, num_workers=2)
    assert plain(loader) == [[i, i + 1] for i in range(0, 12, 2)]
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("stream", [False, True])
def test_an_iteration_whose_processes_always_crash_ends_with_an_error(tmp_path: Path, stream: bool) -> None:
    dataset: Any = CrashingStream() if stream else Crashes(tmp_path / "died", once=False)
    with pytest.raises(RunError, match="died"):
        list(offload.DataLoader(dataset, batch_size=2, num_workers=2))
    assert plain(offload.DataLoader(Numbers(4), batch_size=2)) == [[0, 1], [2, 3]]  # other iterations go on
