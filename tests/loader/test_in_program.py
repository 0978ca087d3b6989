"""With ``num_workers=0``, an iterable data set is read as torch reads it: in the program. No test here starts a Ray."""

from __future__ import annotations

import copy
import gc
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.errors import ConfigError
from offload.loader import probing
from tests.loader.same import same


class Stream(torch_data.IterableDataset[Any]):
    """It keeps in itself what it has done, and draws from all generators."""

    def __init__(self, n: int, fails_at: int | None = None) -> None:
        self.n, self.fails_at = n, fails_at
        self.epochs = 0
        self.seen: dict[int, int] = {}

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        return _Samples(self)

    def sample(self, i: int) -> Any:
        self.seen[i] = self.seen.get(i, 0) + 1
        if i == self.fails_at:
            raise KeyError(i)
        return torch.tensor([i, self.epochs, random.random(), np.random.rand(), float(torch.rand(()))])


class _Samples(Iterator[Any]):
    """An iterator that goes on after an error."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._next = stream, 0

    def __next__(self) -> Any:
        if self._next == self._stream.n:
            raise StopIteration
        self._next += 1
        return self._stream.sample(self._next - 1)


def keep(samples: Any) -> Any:
    return samples


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def read(loader: Any, most: int | None) -> list[Any]:
    """An epoch, in which the program itself draws, too, and which it leaves after ``most`` batches."""
    got: list[Any] = []
    iterator = iter(loader)
    while most is None or len(got) < most:
        try:
            got.append((next(iterator), drawn()))
        except KeyError as error:
            got.append(repr(error))
        except StopIteration:
            break
    return got


@given(
    n=st.integers(0, 12),
    fails_at=st.none() | st.integers(0, 11),
    named=st.fixed_dictionaries(
        {
            "batch_size": st.none() | st.integers(1, 5),
            "collate_fn": st.sampled_from([None, keep]),
            "generator": st.sampled_from([None, 7]),
        }
    ),
    drop_last=st.booleans(),
    epochs=st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=3),
)
def test_batches_random_numbers_and_what_the_data_set_keeps_are_those_of_torch(
    n: int, fails_at: int | None, named: dict[str, Any], drop_last: bool, epochs: list[int | None]
) -> None:
    results = []
    for kind in (torch_data.DataLoader, offload.DataLoader):
        seed_all()
        stream = Stream(n, fails_at)
        generator = None if named["generator"] is None else torch.Generator().manual_seed(named["generator"])
        own = {"generator": generator, "drop_last": drop_last and named["batch_size"] is not None}
        loader: Any = kind(stream, **{**named, **own})
        results.append(([read(loader, most) for most in epochs], vars(stream), drawn()))
    assert same(results[1], results[0])


@given(n=st.integers(0, 12), size=st.integers(1, 4), data=st.data(), seed=st.sampled_from([None, 3]))
def test_a_resumed_loader_goes_on_with_the_same_samples(n: int, size: int, data: Any, seed: int | None) -> None:
    def make() -> Any:
        return offload.DataLoader(Stream(n), batch_size=size, seed=seed)

    seed_all()
    whole = list(make())
    cut = data.draw(st.integers(0, len(whole)))
    seed_all()
    before = make()
    iterator = iter(before)
    got = [next(iterator) for _ in range(cut)]
    state = before.state_dict()
    torch.manual_seed(99)  # another process, whose generators are elsewhere
    after = make()
    after.load_state_dict(state)
    program = copy.deepcopy(torch.get_rng_state())
    got += list(after)
    assert same(got, whole)
    assert torch.equal(torch.get_rng_state(), program)
    assert after.state_dict()["epoch"] == 1


def test_a_seed_of_the_loader_decides_and_leaves_the_programs_generators_alone() -> None:
    def epochs(first: int) -> list[Any]:
        loader: Any = offload.DataLoader(Stream(4), batch_size=2, seed=first)
        return [list(loader), list(loader)]

    seed_all()
    before = torch.get_rng_state()
    one = epochs(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(epochs(3), one)
    assert not same(epochs(4), one)
    assert not same(one[0][0][:, 2:], one[1][0][:, 2:])


class Thread(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield threading.current_thread()


def test_it_needs_no_ray_and_says_once_where_it_reads(caplog: pytest.LogCaptureFixture) -> None:
    connected = ray.is_initialized()
    loader: Any = offload.DataLoader(Thread(), batch_size=None)
    for _ in range(2):
        assert list(loader) == [threading.current_thread()]
    assert loader._engine is None
    assert ray.is_initialized() == connected
    said = [record.message for record in caplog.records if record.name == "offload"]
    assert len(said) == 1
    assert "the program itself reads the iterable data set Thread, as num_workers=0 says" in said[0]
    assert caplog.records[0].levelno == logging.WARNING


def test_on_device_and_stats_are_there() -> None:
    loader: Any = offload.DataLoader(Stream(10), batch_size=4, on_device=lambda batch: batch[:, :2] * 2)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    stats = loader.stats()
    assert (stats.batches, stats.cores) == (3, 1)
    assert stats.bytes_per_sample == 20
    assert stats.core_seconds_per_sample > 0
    assert stats.verdict.startswith("the input")


class Endless(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(5)


def test_the_probe_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probing.LoaderProbe(name="batches", tell=lambda phase, share: None, drain_s=0.1, replay_s=0.1)
    monkeypatch.setattr(probing, "active", probe)
    batches: Any = offload.DataLoader(Endless(), batch_size=4)
    with pytest.raises(probing.ProbedError):
        list(batches)
    assert (probe.samples, probe.step_s > 0) == (4, True)
    assert all(cpu_s >= 0 and size == 20 for cpu_s, size in probe.costs)
    assert any(cpu_s > 0 for cpu_s, _ in probe.costs)


@pytest.mark.parametrize("named", [{"timeout": 3}, {"placement": "other_nodes"}], ids=str)
def test_what_only_other_processes_can_do_is_refused(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not possible with num_workers=0 and an iterable data set: the program"):
        offload.DataLoader(Stream(3), **named)
    loader: Any = offload.DataLoader(Stream(3))
    loader.timeout = 3.0
    with pytest.raises(ConfigError, match=r"timeout=3 is not possible.*Pass num_workers of 1 or more"):
        next(iter(loader))
    offload.DataLoader(Stream(3), num_workers=1, **named)


def test_a_state_is_plain_data(tmp_path: Path) -> None:
    loader: Any = offload.DataLoader(Stream(5))
    iterator = iter(loader)
    next(iterator)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    again: Any = offload.DataLoader(Stream(5))
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [int(batch[0, 0]) for batch in again] == [1, 2, 3, 4]


class Closing(torch_data.IterableDataset[int]):
    """It notes when the program no longer reads."""

    closed = False

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            self.closed = True


def test_a_data_set_hears_at_once_that_nobody_reads_any_more() -> None:
    data = Closing()
    gc.disable()
    try:
        for _ in offload.DataLoader(data, batch_size=2):
            break
        assert data.closed
    finally:
        gc.enable()


class _OwnIterator(torch_data.IterableDataset[int], Iterator[int]):
    """A data set that is its own iterator."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == 10:
            raise StopIteration
        self.at += 1
        return self.at


def test_a_data_set_that_is_its_own_iterator_stays_where_it_is() -> None:
    ours, torchs = _OwnIterator(), _OwnIterator()
    loader = offload.DataLoader(ours, batch_size=None, num_workers=0)
    iterator = iter(loader)
    before, middle = loader.state_dict(), [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    reference = torch_data.DataLoader(torchs, batch_size=None)
    assert [*middle, *iterator] == list(reference) == list(range(1, 11))
    assert list(offload.DataLoader(ours, batch_size=None, num_workers=0)) == list(reference) == []
    resumed = offload.DataLoader(ours, batch_size=None, num_workers=0)
    resumed.load_state_dict(before)
    assert list(resumed) == []
    resumed.load_state_dict(state)
    with pytest.raises(ConfigError, match="after 3 batches of an epoch, and the data set gives 0 now"):
        list(resumed)
