"""What both engines of a DataLoader keep: Ray's, and the processes of this machine. What only one of them does is tested beside it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data

import offload
from offload.errors import RunError
from tests.helpers import end_loaders, eventually

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ENGINES = ["ray", "fork"]


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    end_loaders()


def choose(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Let new loaders use this engine, or processes of this machine that start in this way."""
    monkeypatch.setattr("offload.engine.program_uses_ray", lambda: engine == "ray")
    monkeypatch.setattr("offload.loader.local.this_machine.DEFAULT_METHOD", None if engine == "ray" else engine)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(monkeypatch, request.param)
    return str(request.param)


class Augmented(torch_data.Dataset[Any]):
    """Samples with random numbers, some of them large enough to travel beside the others."""

    def __init__(self, n: int = 37, size: int = 8) -> None:
        self.n, self.size = n, size

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((self.size,), i) + torch.rand(self.size), "name": f"sample {i}"}


class Deadly(Augmented):
    """Sample 11 kills its process: the first that gets it, or every one."""

    def __init__(self, once: Path | None) -> None:
        super().__init__()
        self.once = once

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 11 and (self.once is None or not self.once.exists()):
            if self.once is not None:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class Bad(Augmented):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 11:
            raise ValueError("sample 11 is bad")
        return super().__getitem__(i)


class Shares(torch_data.IterableDataset[Any]):
    """Each worker yields its share of the numbers, with a random number."""

    def __init__(self, n: int = 40, deadly: int | None = None) -> None:
        self.n, self.deadly = n, deadly

    def __iter__(self) -> Iterator[Any]:
        worker = torch_data.get_worker_info()
        assert worker is not None
        for i in range(worker.id, self.n, worker.num_workers):
            if i == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            yield i, torch.rand(1)


class Hanging(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> int:
        signal.pause()
        return i


def read(loader: Any) -> list[Any]:
    """The batches as plain data."""
    return [plain(batch) for batch in loader]


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def augmented(**named: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return offload.DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator, seed=5, **named)


def test_all_engines_yield_the_same_batches_with_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for engine in (*ENGINES, "forkserver"):
        choose(monkeypatch, engine)
        loader: Any = augmented(num_workers=2)
        epochs = [read(loader), read(loader)]
        shares: Any = offload.DataLoader(Shares(), batch_size=3, num_workers=3, seed=5)
        seen[engine] = [*epochs, read(shares), read(shares)]
        assert epochs[0] != epochs[1]
    assert seen["ray"] == seen["fork"] == seen["forkserver"]


@pytest.mark.parametrize(("begins", "goes_on"), [("fork", "ray"), ("ray", "fork")])
@pytest.mark.parametrize("cut", [3, 10])
def test_an_epoch_begun_on_one_engine_goes_on_on_another(
    monkeypatch: pytest.MonkeyPatch, begins: str, goes_on: str, cut: int
) -> None:
    for make in (augmented, lambda: offload.DataLoader(Shares(), batch_size=3, num_workers=3, seed=5)):
        choose(monkeypatch, begins)
        loader = make()
        expected = read(loader) + read(loader)
        loader = make()
        batches = iter(loader)
        seen = [plain(next(batches)) for _ in range(cut)]
        state = json.loads(json.dumps(loader.state_dict()))
        del batches
        choose(monkeypatch, goes_on)
        resumed = make()
        resumed.load_state_dict(state)
        seen += read(resumed) + read(resumed)
        assert seen == expected


def test_the_batches_of_a_killed_process_are_made_again(engine: str, tmp_path: Path) -> None:
    expected = read(offload.DataLoader(Augmented(), batch_size=4, seed=5))
    assert read(offload.DataLoader(Deadly(tmp_path / "killed"), batch_size=4, seed=5)) == expected
    assert (tmp_path / "killed").exists()


def test_samples_that_kill_every_process_end_the_iteration(engine: str) -> None:
    loader = offload.DataLoader(Deadly(None), batch_size=4, seed=5)
    with pytest.raises(RunError, match="the same samples have died"):
        read(loader)
    del loader.dataset.once  # type: ignore[attr-defined]
    loader.dataset.once = Path(__file__)  # type: ignore[attr-defined]
    assert len(read(loader)) == 10  # the loader itself goes on


def test_a_killed_reader_ends_the_iteration(engine: str) -> None:
    loader = offload.DataLoader(Shares(deadly=20), batch_size=2, num_workers=2)
    with pytest.raises(RunError):
        read(loader)
    loader.dataset.deadly = None  # type: ignore[attr-defined]
    assert sorted(i for batch in read(loader) for i in batch[0]) == list(range(40))


def test_an_exception_comes_in_the_place_of_its_batch(engine: str) -> None:
    batches = iter(offload.DataLoader(Bad(), batch_size=4, seed=5))
    expected = read(offload.DataLoader(Augmented(), batch_size=4, seed=5))
    seen = []
    for number in range(10):
        if number == 2:
            with pytest.raises(ValueError, match="sample 11 is bad"):
                next(batches)
            seen.append(expected[2])
        else:
            seen.append(plain(next(batches)))
    assert seen == expected
    with pytest.raises(StopIteration):
        next(batches)


def test_a_batch_that_does_not_come_in_time_raises_as_in_torch(engine: str) -> None:
    with pytest.raises(RuntimeError, match="timed out after"):
        next(iter(offload.DataLoader(Hanging(), num_workers=1, timeout=0.2)))


def test_what_cannot_travel_back_is_an_error_of_its_batch(engine: str) -> None:
    def locked(samples: list[Any]) -> Any:
        return threading.Lock() if samples[0]["name"] == "sample 4" else len(samples)

    batches = iter(offload.DataLoader(Augmented(), batch_size=4, collate_fn=locked))
    assert next(batches) == 4
    with pytest.raises(TypeError, match="lock"):
        next(batches)
    assert next(batches) == 4


def test_an_iteration_left_early_leaves_the_next_one_whole(engine: str) -> None:
    loader: Any = offload.DataLoader(Augmented(), batch_size=4, seed=5)
    expected = read(offload.DataLoader(Augmented(), batch_size=4, seed=5))
    first = iter(loader)
    assert plain(next(first)) == expected[0]
    second = iter(loader)  # both at once
    next(second)
    assert plain(next(first)) == expected[1]
    del first, second
    loader.load_state_dict(offload.DataLoader(Augmented(), batch_size=4, seed=5).state_dict())
    assert read(loader) == expected


def test_batches_that_the_program_keeps_stay_as_they_are(engine: str) -> None:
    """Their memory is not used again, and they need no open files."""
    loader: Any = offload.DataLoader(Augmented(300, size=40_000), batch_size=1)
    open_before = len(os.listdir("/proc/self/fd"))
    kept = list(loader)
    assert len(os.listdir("/proc/self/fd")) < open_before + 100
    assert [int(batch["x"][0, 0]) for batch in kept] == list(range(300))
    kept[0]["x"] += 1  # writable
    assert int(kept[1]["x"][0, 0]) == 1


def test_a_fork_of_the_program_iterates_with_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "fork")
    loader: Any = offload.DataLoader(Augmented(), batch_size=4, seed=5, persistent_workers=True, num_workers=2)
    read(loader)
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write_end, json.dumps(read(loader)).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        theirs = json.load(pipe)
    os.waitpid(child, 0)
    assert read(loader) == theirs  # the second epoch, in both


def test_on_device_runs_ahead_of_the_program(engine: str) -> None:
    done: list[int] = []

    def on_device(batch: Any) -> int:
        done.append(len(batch["name"]))
        return len(batch["name"])

    batches = iter(offload.DataLoader(Augmented(), batch_size=4, on_device=on_device, num_workers=1))
    assert next(batches) == 4
    eventually(lambda: len(done) > 1)
    assert sum(batches) == 33
    assert sum(done) == 37


@pytest.mark.parametrize("engine", ["ray", "forkserver"], indirect=True)
def test_a_data_set_that_cannot_be_loaded_is_named(engine: str) -> None:
    with pytest.raises(RunError, match="not here"):
        read(offload.DataLoader(Unloadable()))


def test_a_forked_process_has_the_data_set_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "fork")
    assert read(offload.DataLoader(Unloadable())) == [[0]]


class Unloadable(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> int:
        return i

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise ValueError("not here")
