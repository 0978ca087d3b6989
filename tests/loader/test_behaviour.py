"""What a program that iterates over an offload.DataLoader may rely on, beside the batches themselves."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import ray.train.torch
import torch
import torch.utils.data as torch_data

import offload
from offload.errors import ConfigError, RunError
from offload.loader.job import session as sessions
from offload.pipeline.feed.sizing import BATCH_TASK_S
from tests.helpers import end_loaders, eventually, title_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    end_loaders()


class Numbers(torch_data.Dataset[Any]):
    def __init__(self, n: int = 20) -> None:
        self.n, self.offset = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return i + self.offset


class BadSampleError(Exception):
    """The user's own."""


class Faulty(Numbers):
    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise BadSampleError(f"sample {i} is bad")
        return i


def values(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch]


class InStore(Numbers):
    """Its numbers lie in Ray's object store, and an actor counts who asks for them."""

    def __init__(self, numbers: Any, counter: Any) -> None:
        super().__init__(4)
        self.numbers, self.counter = numbers, counter

    def __getitem__(self, i: int) -> Any:
        ray.get(self.counter.count.remote())
        return ray.get(self.numbers)[i]


def test_a_data_set_may_hold_references_and_actors_of_ray() -> None:
    class Counter:
        def __init__(self) -> None:
            self.counted = 0

        def count(self) -> int:
            self.counted += 1
            return self.counted

    counter = ray.remote(Counter).options(num_cpus=0).remote()
    loader: Any = offload.DataLoader(InStore(ray.put([5, 6, 7, 8]), counter), batch_size=4)
    assert values(loader) == [5, 6, 7, 8]
    assert ray.get(counter.count.remote()) == 5


# -- iterating ----------------------------------------------------------------------------------------------------------


def test_several_iterations_run_at_once_and_may_end_early() -> None:
    loader: Any = offload.DataLoader(Numbers(), batch_size=3)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in pairs)
    assert len(pairs) == len(loader) == 7
    for batch in loader:
        assert batch.tolist() == [0, 1, 2]
        break
    assert values(loader) == list(range(20))


def test_loaders_may_name_their_cluster_in_different_words() -> None:
    """As where only the loader of the training data has an address: a loader of its own session would find no free core."""
    here = ray.get_runtime_context().gcs_address
    loaders = [offload.DataLoader(Numbers(4), batch_size=2, address=address) for address in (None, "auto", here)]
    assert [values(loader) for loader in loaders] == [[0, 1, 2, 3]] * 3


def test_an_exhausted_iterator_stays_exhausted() -> None:
    iterator = iter(offload.DataLoader(Numbers(2)))
    assert len(list(iterator)) == 2
    assert next(iterator, None) is None


def test_an_exception_is_raised_at_its_batch_with_the_users_traceback_and_the_rest_follows() -> None:
    iterator = iter(offload.DataLoader(Faulty(), batch_size=5))
    assert next(iterator).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(BadSampleError, match=r"(?s)sample 7 is bad") as caught:
        next(iterator)
    assert "in __getitem__" in str(caught.value)
    assert __file__ in str(caught.value)
    assert next(iterator).tolist() == [10, 11, 12, 13, 14]


def test_a_collate_function_that_fails_says_so() -> None:
    def collate(samples: list[int]) -> int:
        return len(samples) // 0

    with pytest.raises(ZeroDivisionError, match="in collate"):
        next(iter(offload.DataLoader(Numbers(), batch_size=2, collate_fn=collate)))


def test_what_the_program_changes_in_its_data_set_counts_from_the_next_epoch_on() -> None:
    dataset = Numbers(4)
    loader: Any = offload.DataLoader(dataset, batch_size=2)
    assert values(loader) == [0, 1, 2, 3]
    dataset.offset = 100
    assert values(loader) == [100, 101, 102, 103]


class Relative(Numbers):
    """It reads files of the program's folder, one as it is constructed and one with each sample."""

    def __init__(self) -> None:
        super().__init__(2)
        self.first = int(Path("first").read_text())

    def __reduce__(self) -> Any:
        return type(self), ()

    def __getitem__(self, i: int) -> Any:
        return self.first + i + int(Path("second").read_text())


class RelativeStream(Relative, torch_data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([self[0], self[1]])


@pytest.mark.parametrize("kind", [Relative, RelativeStream])
def test_paths_of_a_data_set_may_be_relative_to_the_programs_folder(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray was started in another, as on a cluster that a program joins. A program may change its folder, too."""
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "first").write_text(f"{100 * number}")
        (tmp_path / name / "second").write_text(f"{10 * number}")
    iterators = []
    for name in ("a", "b"):
        monkeypatch.chdir(tmp_path / name)
        iterators.append(iter(offload.DataLoader(kind())))
    assert [[int(batch) for batch in iterator] for iterator in iterators] == [[0, 1], [110, 111]]


def test_a_list_is_a_data_set() -> None:
    assert values(offload.DataLoader([5, 6, 7], batch_size=2)) == [5, 6, 7]


class Reuses(Numbers):
    """Each sample lies in the same memory."""

    def __getitem__(self, i: int) -> Any:
        if not hasattr(self, "memory"):
            self.memory = torch.zeros(40_000)
        return self.memory.fill_(i)


def test_a_data_set_may_reuse_its_memory() -> None:
    assert [int(sample[0]) for sample in offload.DataLoader(Reuses(200), batch_size=None)] == list(range(200))


class Stumbles(torch_data.IterableDataset[Any]):
    """An iterator that fails once, and then goes on."""

    def __iter__(self) -> Any:
        self.next = 0
        return self

    def __next__(self) -> int:
        self.next += 1
        if self.next == 2:
            raise BadSampleError("the second one")
        if self.next > 4:
            raise StopIteration
        return self.next


def test_an_iterable_data_set_goes_on_after_an_exception() -> None:
    iterator = iter(offload.DataLoader(Stumbles()))
    assert int(next(iterator)) == 1
    with pytest.raises(BadSampleError, match="the second one"):
        next(iterator)
    assert [int(batch) for batch in iterator] == [3, 4]


class Caches(Numbers):
    """It keeps what it has read."""

    def __init__(self, n: int = 6) -> None:
        super().__init__(n)
        self.cache: dict[int, int] = {}

    def __getitem__(self, i: int) -> Any:
        return self.cache.setdefault(i, i)


def test_what_a_map_style_data_set_stores_in_itself_is_named_once_without_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def remarks(dataset: Any, **named: Any) -> list[str]:
        caplog.clear()
        loader: Any = offload.DataLoader(dataset, batch_size=2, **named)
        assert [values(loader) for _ in range(2)] == [list(range(6))] * 2
        return [record.message for record in caplog.records if record.name == "offload"]

    (said,) = remarks(torch_data.Subset(Caches(), range(6)))
    assert said.startswith("the preprocessing processes change Caches.cache, each in its own copy of the data set")
    assert remarks(Numbers(6)) == []
    assert remarks(Caches(), num_workers=2) == []


# -- the processes of an iterable data set --------------------------------------------------------------------------------


class Reader(torch_data.IterableDataset[Any]):
    """Each sample names its process, the iterations that this copy of the data set has begun, and its number. ``stuck``: after its first
    batch, which takes longer than the shortest task of a reader, the reading does not go on."""

    def __init__(self, n: int = 6, stuck: bool = False) -> None:
        self.n, self.stuck = n, stuck
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for i in range(self.n):
            while self.stuck and i == 2:
                time.sleep(0.05)
            if self.stuck:
                time.sleep(BATCH_TASK_S)
            yield os.getpid(), self.epochs, i


def read(loader: Any) -> tuple[set[int], list[tuple[int, int]]]:
    """The processes of an epoch, and the rest of its samples."""
    found = [sample for batch in loader for sample in batch]
    return {process for process, _, _ in found}, [(epochs, i) for _, epochs, i in found]


def reading(dataset: Any, **named: Any) -> Any:
    return offload.DataLoader(dataset, batch_size=2, collate_fn=list, **{"num_workers": 1, **named})


def resting(loader: Any) -> int:
    """The number of readers that wait for the loader's next epoch."""
    feed, owner = next(iter(sessions._sessions.values())).feed, loader._engine._user.name
    waiting = feed.__ray_call__.remote(lambda feed: sum(each.owner == owner for each in feed._resting._ready()))
    return int(ray.get(waiting))


WHOLE = [(1, i) for i in range(6)]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_processes_of_an_iterable_data_set_stay_for_the_next_epoch_which_begins_anew(persistent: bool) -> None:
    dataset = Reader(3)
    loader = reading(dataset, num_workers=2, persistent_workers=persistent)
    first, samples = read(loader)
    assert len(first) == 2
    assert sorted(samples) == sorted(WHOLE[:3] * 2)
    dataset.n = 6  # the program changes it
    for _ in range(2):
        again, samples = read(loader)
        assert again == first
        assert sorted(samples) == sorted(WHOLE * 2)
    del loader
    gc.collect()
    eventually(lambda: not any(map(psutil.pid_exists, first)))


def test_an_iteration_that_was_left_does_not_touch_the_next_one() -> None:
    loader = reading(Reader(1000))
    for _ in range(3):
        assert next(iter(loader))[0][1:] == (1, 0)
    processes, samples = read(loader)
    assert samples == [(1, i) for i in range(1000)]
    assert len(processes) == 1


def test_a_reader_that_is_stuck_is_replaced() -> None:
    dataset = Reader(stuck=True)
    loader = reading(dataset)
    stuck = next(iter(loader))[0][0]
    dataset.stuck = False
    processes, samples = read(loader)
    assert samples == WHOLE
    assert stuck not in processes
    eventually(lambda: not psutil.pid_exists(stuck))


def test_a_reader_that_died_between_two_epochs_is_replaced() -> None:
    loader = reading(Reader())
    died, _ = read(loader)
    eventually(lambda: resting(loader) == 1)
    for process in map(psutil.Process, died):
        process.kill()
        eventually(lambda process=process: not title_of(process))
    processes, samples = read(loader)
    assert samples == WHOLE
    assert processes.isdisjoint(died)


def test_what_worker_init_fn_does_once_in_a_process_it_does_once_in_each() -> None:
    def initialise(worker: int) -> None:
        assert "INITIALISED_IN_A_TEST" not in os.environ
        os.environ["INITIALISED_IN_A_TEST"] = "1"

    loader = reading(Reader(), worker_init_fn=initialise)
    epochs = [read(loader) for _ in range(3)]
    assert [samples for _, samples in epochs] == [WHOLE] * 3
    assert len(set.union(*(processes for processes, _ in epochs))) == 3


def test_a_sampler_that_fails_does_so_after_the_batches_before() -> None:
    def order() -> Iterator[int]:
        yield from (3, 1)
        raise BadSampleError("no third index")

    iterator = iter(offload.DataLoader(Numbers(), sampler=order()))
    assert [int(next(iterator)), int(next(iterator))] == [3, 1]
    with pytest.raises(BadSampleError, match="no third index"):
        next(iterator)


class Shares(torch_data.IterableDataset[int]):
    """Each worker reads its share."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = torch_data.get_worker_info()
        yield from range(self.n) if info is None else range(info.id, self.n, info.num_workers)


def test_a_state_of_an_iterable_data_set_is_resumed_exactly_or_refused() -> None:
    named: dict[str, Any] = {"batch_size": 2, "num_workers": 2}
    whole = [batch.tolist() for batch in offload.DataLoader(Shares(), **named)]
    before: Any = offload.DataLoader(Shares(), **named)
    iterator = iter(before)
    got = [next(iterator).tolist() for _ in range(5)]
    state = json.loads(json.dumps(before.state_dict()))
    after: Any = offload.DataLoader(Shares(), **named)
    after.load_state_dict(state)
    assert got + [batch.tolist() for batch in after] == whole
    three: Any = offload.DataLoader(Shares(), **{**named, "num_workers": 3})
    three.load_state_dict(state)
    with pytest.raises(ConfigError, match="with num_workers=2, and this loader has num_workers=3"):
        iter(three)
    shorter: Any = offload.DataLoader(Shares(6), **named)
    shorter.load_state_dict(state)
    with pytest.raises(ConfigError, match="taken after 5 batches of an epoch, and the data set gives 4 now"):
        list(shorter)


def test_a_loaded_state_is_the_state_until_the_next_iteration(tmp_path: Path) -> None:
    loader: Any = offload.DataLoader(Numbers(), batch_size=2, shuffle=True)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again: Any = offload.DataLoader(Numbers(), batch_size=2, shuffle=True)
    again.load_state_dict(state)
    assert (again.state_dict()["epoch"], again.state_dict()["batches"]) == (0, 1)
    assert len(list(again)) == 9


def test_a_feed_that_ended_between_two_iterations_is_replaced() -> None:
    loader: Any = offload.DataLoader(Numbers(), batch_size=2)
    for _ in range(2):
        assert values(loader) == list(range(20))
        kill_feeds()


def test_an_iteration_whose_feed_ends_says_so_and_the_next_one_is_whole() -> None:
    loader: Any = offload.DataLoader(Slow(1000), batch_size=2)  # most of it is not made when the feed ends
    iteration = iter(loader)
    next(iteration)
    kill_feeds()
    with pytest.raises(RunError, match=r"the feed of the DataLoader is lost.*Iterate again"):
        list(iteration)
    assert values(loader) == list(range(1000))


def test_the_feed_after_a_lost_one_has_all_its_cores_though_ray_frees_them_late() -> None:
    found = processes(4)
    for process in found:
        os.kill(process, signal.SIGSTOP)  # Ray asks it to end, and kills it only seconds later
    kill_feeds()
    assert processes(4).isdisjoint(found)


def processes(number: int) -> set[int]:
    """The processes that make samples, once they are so many."""
    found: set[int] = set()

    def make() -> bool:
        found.clear()
        found.update(values(offload.DataLoader(Process(100))))
        return len(found) == number

    eventually(make)
    return found


def kill_feeds() -> None:
    for session in sessions._sessions.values():
        ray.kill(session.feed)
        eventually(lambda feed=session.feed: _is_gone(feed))


def _is_gone(actor: Any) -> bool:
    """Ray kills an actor some time after it was asked to."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=1)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.GetTimeoutError:
        pass
    return False


class Stuck(Numbers):
    """Its second sample never comes."""

    def __getitem__(self, i: int) -> Any:
        while i == 1:
            time.sleep(0.1)
        return i


class Slow(Numbers):
    def __getitem__(self, i: int) -> Any:
        time.sleep(0.01)
        return super().__getitem__(i)


class Process(Numbers):
    """The process that makes each sample, which takes it a moment."""

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.02)
        return os.getpid()


def test_a_batch_that_does_not_come_in_time_is_an_error_as_in_torch_and_its_core_works_again() -> None:
    processes(4)
    iterator: Any = iter(offload.DataLoader(Stuck(2), timeout=2))
    eventually(lambda: _next_or_why(iterator) == 0)
    assert _next_or_why(iterator) == "DataLoader timed out after 2 seconds"
    iterator.close()
    processes(4)


def _next_or_why(iterator: Any) -> int | str:
    try:
        return int(next(iterator))
    except RuntimeError as error:
        return str(error)


# -- random numbers -----------------------------------------------------------------------------------------------------


class Noisy(Numbers):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


def epochs(seed: int | None, batch_size: int = 4, count: int = 2) -> list[torch.Tensor]:
    loader: Any = offload.DataLoader(Noisy(), batch_size=batch_size, seed=seed)
    return [torch.cat(list(loader)) for _ in range(count)]


def test_augmentations_are_the_same_in_each_run_and_differ_by_sample_and_epoch() -> None:
    first, second = epochs(3)
    again = epochs(3)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert len({row[1] for row in first.tolist()}) == 20
    assert torch.equal(first, epochs(3, batch_size=7, count=1)[0])  # they do not depend on the batches


def test_without_a_seed_torchs_generator_draws_it() -> None:
    torch.manual_seed(1)
    first = epochs(None)
    torch.manual_seed(1)
    assert torch.equal(first[0], epochs(None)[0])
    assert not torch.equal(first[0], epochs(None)[0])


@pytest.mark.parametrize("working", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_loader_resumed_between_two_epochs_keeps_its_generators(working: dict[str, Any], tmp_path: Path) -> None:
    def make() -> Any:
        one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
        sampler = torch_data.RandomSampler(Numbers(), generator=other)
        return offload.DataLoader(Noisy(), batch_size=4, sampler=sampler, generator=one, **working)

    whole = make()
    epochs = [torch.cat(list(whole)) for _ in range(3)]
    first = make()
    list(first)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again.load_state_dict(again.state_dict())  # a loaded state is the state
    assert all(torch.equal(torch.cat(list(again)), epoch) for epoch in epochs[1:])


# -- torch's workers ----------------------------------------------------------------------------------------------------


class Who(Numbers):
    def __getitem__(self, i: int) -> Any:
        info = torch_data.get_worker_info()
        return -1 if info is None else 100 * info.num_workers + info.id


def test_data_sets_see_the_worker_that_torch_would_have() -> None:
    named: dict[str, Any] = {"batch_size": 3, "num_workers": 2}
    # torch's own loader would fork this process, in which Ray has threads.
    assert (
        values(offload.DataLoader(Who(), **named))
        == [200 + batch % 2 for batch in range(7) for _ in range(3)][: len(Who())]
    )
    assert values(offload.DataLoader(Who(2))) == [-1, -1]


def test_worker_init_fn_runs_before_the_workers_first_batch() -> None:
    def initialise(worker: int) -> None:
        info = torch_data.get_worker_info()
        assert info is not None
        assert info.id == worker
        info.dataset.offset = 10 * (worker + 1)  # type: ignore[attr-defined]

    # Both roles share a process and its copy of the data set here, so only that it ran can be seen.
    got = values(offload.DataLoader(Numbers(4), batch_size=2, num_workers=1, worker_init_fn=initialise))
    assert got == [10, 11, 12, 13]


# -- ends ---------------------------------------------------------------------------------------------------------------


def streams() -> int:
    session = next(iter(sessions._sessions.values()))
    return int(ray.get(session.feed.open_streams.remote()))


def test_an_iterator_that_nobody_needs_ends() -> None:
    iterator = iter(offload.DataLoader(Numbers(1000), batch_size=2))
    next(iterator)
    before = streams()
    del iterator
    gc.collect()
    eventually(lambda: streams() < before)


def test_threads_of_ended_iterations_end() -> None:
    list(offload.DataLoader(Numbers(4)))
    gc.collect()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "offload-loader"])


def test_a_loader_without_users_gives_the_cores_back() -> None:
    loader = offload.DataLoader(Numbers(4))
    list(loader)
    del loader
    end_loaders()


@pytest.mark.soak  # Ray Train's own helpers, of which test_ray_contract.py looks for none, and a minute
def test_the_workers_of_ray_train_share_a_feed(tmp_path: Path) -> None:
    def train() -> None:
        rank = ray.train.get_context().get_world_rank()
        sampler = torch_data.DistributedSampler(range(20), num_replicas=2, rank=rank, shuffle=False)  # type: ignore[arg-type]
        loader = offload.DataLoader(Numbers(), batch_size=5, sampler=sampler)
        (tmp_path / f"rank-{rank}").write_text(json.dumps([batch.tolist() for batch in loader]))

    end_loaders()
    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    ray.train.torch.TorchTrainer(
        train, scaling_config=scaling, run_config=ray.train.RunConfig(storage_path=str(tmp_path / "storage"))
    ).fit()
    for rank in range(2):
        got = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert got == [[*range(rank, 10, 2)], [*range(10 + rank, 20, 2)]]
    # The feed ends once no rank uses it, and gives the cores back.
    eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


# -- the loader as an object ----------------------------------------------------------------------------------------------


def test_a_loader_travels_to_other_processes() -> None:
    loader: Any = offload.DataLoader(Numbers(4), batch_size=2, seed=1)
    list(loader)
    assert values(pickle.loads(pickle.dumps(loader))) == [0, 1, 2, 3]


def test_it_is_a_dataloader_of_torch() -> None:
    loader = offload.DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=8)
    assert isinstance(loader, torch_data.DataLoader)
    assert (loader.batch_size, loader.num_workers) == (4, 8)
    assert isinstance(loader.sampler, torch_data.RandomSampler)


def test_a_forked_process_is_told_to_be_spawned() -> None:
    loader = offload.DataLoader(Numbers(4))
    list(loader)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        said = b""
        try:
            list(loader)
        except RunError as error:
            said = str(error).encode()
        os.write(write, said or b"nothing")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert b'get_context("spawn")' in pipe.read()
    assert values(loader) == [0, 1, 2, 3]  # and this process goes on


def test_on_device_gets_the_batch() -> None:
    loader = offload.DataLoader(Numbers(4), batch_size=2, on_device=lambda batch: batch.float() / 2)
    assert [batch.tolist() for batch in loader] == [[0.0, 0.5], [1.0, 1.5]]


def test_stats_tell_what_was_read() -> None:
    loader: Any = offload.DataLoader(Numbers(40), batch_size=2)
    assert loader.stats().verdict == "no batch was read yet"
    list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.cores) == (20, 4)
    assert stats.core_seconds_per_sample > 0
    assert 0 <= stats.stall <= 1
    loader.reset_stats()
    assert loader.stats().batches == 0


def test_the_time_after_an_epoch_that_was_left_early_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.0
    monkeypatch.setattr("offload.loader.stats.time", SimpleNamespace(perf_counter=lambda: now))
    loader: Any = offload.DataLoader(Numbers(40), batch_size=2)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        now += 1
        next(iterator)
        now += 1000  # a validation
    assert loader.stats().samples_per_s == 2


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"seed": -1}, "DataLoader: seed must be at least 0"),
        ({"seed": 1.5}, "DataLoader: seed must be a whole number"),
        ({"placement": "gpu"}, 'DataLoader: placement must be "all", "other_nodes" or "this_node"'),
        ({"address": ""}, "DataLoader: address must be text"),
        ({"on_device": 3}, "DataLoader: on_device must be callable"),
    ],
)
def test_bad_arguments_are_named(named: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        offload.DataLoader(Numbers(), **named)


@pytest.mark.parametrize(
    "named",
    [
        {"batch_size": 0},
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_size": None, "drop_last": True},
    ],
)
def test_what_torch_refuses_is_refused_with_torchs_words(named: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011
        torch_data.DataLoader(Numbers(), **named)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        offload.DataLoader(Numbers(), **named)
    assert str(ours.value) == str(theirs.value)


def test_a_data_set_with_an_open_file_is_refused_with_the_line_to_write() -> None:
    class WithFile(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.file = open(__file__, "rb")  # noqa: SIM115

    dataset = WithFile()
    with (
        dataset.file,
        pytest.raises(ConfigError, match=r"WithFile.*cannot pickle.*def __reduce__\(self\): return WithFile"),
    ):
        iter(offload.DataLoader(dataset))


def test_data_pipes_are_refused() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(ConfigError, match="does not take a DataPipe"):
        offload.DataLoader(IterableWrapper([1, 2]))


def test_a_place_without_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement='other_nodes' leaves no node"):
        iter(offload.DataLoader(Numbers(), placement="other_nodes"))


@pytest.mark.parametrize("state", [{}, {"version": 3, "epoch": 0, "batches": 0, "start": None}, [1]])
def test_a_foreign_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match="state"):
        offload.DataLoader(Numbers()).load_state_dict(state)
