"""The state of a DataLoader's samplers at the beginning of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from offload.loader.state.draws import generators_of, restore, restore_own, state_of


class Stepped(torch.utils.data.SequentialSampler):
    """Its state depends on what the program knows, as that of some samplers for large runs."""

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"start": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the program keeps this state")


def test_a_sampler_that_wants_to_be_told_the_step_keeps_no_state_here() -> None:
    sampler = Stepped(range(3))
    state = state_of([sampler], None)
    assert state["samplers"] == [{"class": "Stepped"}]
    restore(state, [sampler], None)


class Counting(torch.utils.data.Sampler[int]):
    """It gives its state as the dict that it goes on to change."""

    def __init__(self) -> None:
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < 9:
            self.state["at"] += 1
            yield self.state["at"]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_the_state_of_a_sampler_is_that_of_the_beginning_whatever_the_sampler_does_later() -> None:
    sampler = Counting()
    state = state_of([sampler], None)
    assert list(sampler) == list(range(1, 10))
    for _ in range(2):  # a state may be loaded again
        again = Counting()
        restore(state, [again], None)
        assert list(again) == list(range(1, 10))


class Yielding(torch.utils.data.DistributedSampler[int]):
    """As torchdata's StatefulDistributedSampler: it counts what it has given, until the next epoch begins."""

    def __init__(self) -> None:
        super().__init__(range(9), 1, 0)  # type: ignore[arg-type]
        self.given = self.next = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.next = self.next, 0
        for index in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["given"]


def test_a_distributed_sampler_begins_its_epoch_anew_whatever_it_gave_in_the_last_one() -> None:
    sampler = Yielding()
    assert len(list(sampler)) == 9
    sampler.set_epoch(1)
    state = state_of([sampler], None)
    again = Yielding()
    restore(state, [again], None)
    assert list(again) == list(sampler)
    assert again.epoch == 1


class Permuting(torch.utils.data.Sampler[int]):
    """Draws from NumPy's own kind of generator, whose state it tells."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.permutation(8).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.bit_generator.state = state["draws"]


class Epochs(Permuting):
    """Its order is that of its epoch, which the program sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def test_a_sampler_that_tells_its_state_goes_on_with_it_after_the_end_of_an_epoch() -> None:
    sampler, resumed = Permuting(), Permuting()
    list(sampler)
    restore_own(generators_of([sampler], None), [resumed], None)
    assert list(resumed) == list(sampler)


def test_the_state_of_the_end_of_an_epoch_does_not_undo_the_epoch_that_the_program_sets() -> None:
    sampler, resumed = Epochs(), Epochs()
    sampler.set_epoch(3)
    state = generators_of([sampler], None)
    resumed.set_epoch(4)
    restore_own(state, [resumed], None)
    assert resumed.epoch == 4
