"""The orders of a loader's batches are what torch would load, whatever the sampler does with its own memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data

from offload.errors import ConfigError
from offload.loader.orders import orders_of

WANTED = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


class Reusing:
    """A batch sampler that fills the same memory for each batch."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __iter__(self) -> Iterator[Any]:
        for batch in WANTED:
            for place, index in enumerate(batch):
                self.memory[place] = index
            yield self.memory


REUSED: dict[str, Callable[[], Any]] = {
    "list": lambda: [0, 0, 0],
    "array": lambda: np.zeros(3, np.int64),
    "tensor": lambda: torch.zeros(3, dtype=torch.int64),
    "array.array": lambda: array("q", [0, 0, 0]),
    "deque": lambda: deque([0, 0, 0]),
}


def ahead(sampler: Any, *, batches: bool = True, skip: int = 0) -> list[Any]:
    """All orders at once, as a loader that works ahead has them."""
    return list(orders_of(iter(sampler), batches=batches, skip=skip, seed=1, note=lambda indices: None))


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("kind", REUSED)
def test_a_sampler_may_fill_the_same_memory_again(kind: str, skip: int) -> None:
    of_torch = torch_data.DataLoader(range(12), batch_sampler=Reusing(REUSED[kind]()), collate_fn=list)  # type: ignore[arg-type]
    assert [list(map(int, batch)) for batch in of_torch] == WANTED
    orders = ahead(Reusing(REUSED[kind]()), skip=skip)
    assert [list(map(int, order.indices)) for order in orders] == WANTED[skip:]
    assert {type(order.indices) for order in orders} == {type(REUSED[kind]())}
    assert [(order.number, order.batch, order.first) for order in orders] == [
        (i - skip, i, 3 * i) for i in range(skip, 4)
    ]


def test_each_batch_is_noted_as_it_is_drawn() -> None:
    noted: list[Any] = []
    orders = orders_of(iter(WANTED), batches=True, skip=2, seed=1, note=noted.append)
    assert noted == WANTED[:2]
    next(orders)
    assert noted == WANTED[:3]


def test_a_sampler_may_yield_generators() -> None:
    assert [order.indices for order in ahead((iter(batch) for batch in WANTED), skip=1)] == WANTED[1:]


def test_without_batches_indices_are_what_the_sampler_gives() -> None:
    given = ["a", 3, (1, 2), range(3)]
    assert [order.indices for order in ahead(given, batches=False)] == given
    assert [order.first for order in ahead(given, batches=False)] == [0, 1, 2, 3]
    assert [order.indices for order in ahead(Reusing([0, 0, 0]), batches=False)] == WANTED


def test_a_sampler_that_gives_fewer_batches_than_were_read_is_named() -> None:
    assert ahead(Reusing([0, 0, 0]), skip=4) == []
    with pytest.raises(ConfigError, match="taken after 5 batches of an epoch, and the sampler gives 4 now"):
        ahead(Reusing([0, 0, 0]), skip=5)
