"""Readers of iterable data sets rest between iterations, in bounds, and begin each iteration with nothing of the last one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data as torch_data
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.loader.batch_recipe import IterableRecipe
from offload.loader.job.readers import KEPT_S, STUCK_S, IterableReader, ReadingProcess, Resting
from offload.pipeline.blocks.packing import unpack
from tests.helpers import eventually

OWNERS = ("train", "test")
MOST = 3


class RestingMachine(RuleBasedStateMachine):
    """Loaders whose iterations begin and end, and code of the user that ends late or never."""

    @initialize()
    def begin(self) -> None:
        self.resting = Resting()
        self.now = 0.0
        self.using: list[ReadingProcess] = []
        self.running: dict[ReadingProcess, float] = {}  # its code still runs, since the end of its iteration
        self.waiting: dict[ReadingProcess, float] = {}

    def ended(self, readers: list[ReadingProcess]) -> None:
        for reader in readers:
            assert reader in self.running or reader in self.waiting
            self.running.pop(reader, None)
            self.waiting.pop(reader, None)

    @rule(owner=st.sampled_from(OWNERS), worker=st.integers(0, 2), node=st.sampled_from("ab"))
    def iterates(self, owner: str, worker: int, node: str) -> None:
        reader = self.resting.reuse(owner, worker, {node})
        fitting = [r for r in self.waiting if (r.owner, r.worker, r.node) == (owner, worker, node)]
        if reader is None:
            assert not fitting
            reader = ReadingProcess(actor=None, node=node, client="c", owner=owner, worker=worker)
        else:
            assert reader in fitting
            del self.waiting[reader]
        self.using.append(reader)

    @precondition(lambda self: self.using)
    @rule(data=st.data())
    def ends(self, data: Any) -> None:
        reader = self.using.pop(data.draw(st.integers(0, len(self.using) - 1)))
        self.resting.rest(reader, self.now)
        self.running[reader] = self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def is_ready(self, data: Any) -> None:
        reader = data.draw(st.sampled_from(list(self.running)))
        self.waiting[reader] = self.running.pop(reader)
        self.ended(self.resting.ready(reader, MOST))
        assert reader in self.waiting
        of_others = [each for each in self.waiting if each.owner != reader.owner]
        assert len(self.waiting) <= MOST or not of_others

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ended(self.resting.late(self.now))
        assert all(self.now - since <= STUCK_S for since in self.running.values())
        assert all(self.now - since <= KEPT_S for since in self.waiting.values())

    @rule(owner=st.sampled_from(OWNERS))
    def loader_is_gone(self, owner: str) -> None:
        self.ended(self.resting.drop(lambda each: each.owner == owner))
        assert not any(each.owner == owner for each in (*self.running, *self.waiting))

    @invariant()
    def each_place_has_one_reader(self) -> None:
        if not hasattr(self, "resting"):
            return
        places = [(each.owner, each.worker) for each in self.waiting]
        assert len(places) == len(set(places))
        for owner in OWNERS:
            assert self.resting.awaited(owner) == any(each.owner == owner for each in self.running)


TestResting = RestingMachine.TestCase


@pytest.fixture(name="reader")
def _reader() -> Iterator[IterableReader]:
    yield IterableReader()
    gc.unfreeze()  # the process of a reader is its own; this one has other tests


class Counts(torch_data.IterableDataset[Any]):
    """It counts its own iterations. ``leaves``: with each, it leaves a thread behind."""

    def __init__(self, leaves: threading.Event | None = None) -> None:
        self.epochs, self.leaves = 0, leaves

    def __iter__(self) -> Any:
        self.epochs += 1
        if self.leaves is not None:
            threading.Thread(target=self.leaves.wait, daemon=True).start()
        yield from [self.epochs] * 3


class Sent:
    """Stands for a recipe in Ray's object store, of which each iteration unpickles a copy."""

    key = "sent"

    def __init__(self, leaves: threading.Event | None = None) -> None:
        self._leaves = leaves

    def anew(self) -> IterableRecipe:
        return IterableRecipe(
            dataset=Counts(self._leaves), collate_fn=list, batch_size=2, drop_last=False, num_workers=1, seed=0
        )


def epoch(reader: IterableReader, sent: Sent) -> list[Any]:
    reader.begin(sent, 0)  # type: ignore[arg-type]
    block, read = reader.read()
    assert (read.batches, read.ended) == (2, True)
    return [unpack(item) for item in block.items]  # type: ignore[arg-type]


def test_each_iteration_gets_the_data_set_anew_also_after_one_that_was_left(reader: IterableReader) -> None:
    for _ in range(2):
        assert epoch(reader, Sent()) == [[1, 1], [1]]
        assert reader.rest()
    reader.begin(Sent(), 0)  # type: ignore[arg-type]
    assert reader.rest()  # before its first batch
    assert epoch(reader, Sent()) == [[1, 1], [1]]


def test_a_process_in_which_threads_gather_serves_no_further_iteration(reader: IterableReader) -> None:
    end = threading.Event()
    try:
        epoch(reader, Sent(end))
        assert reader.rest()  # libraries start a thread at their first use, which stays

        def one_more() -> bool:
            epoch(reader, Sent(end))
            return not reader.rest()

        eventually(one_more)  # a thread of another test may end meanwhile
    finally:
        end.set()
