"""Batches are delivered in order, each once, whatever order they are made in and whatever is lost on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.loader.batch_recipe import BatchOrder
from offload.loader.line import BatchPlace, IterableLine, MapLine

NODES = ("a", "b")


def order(number: int) -> BatchOrder:
    return BatchOrder(number=number, batch=number, indices=[number], first=number, seed=0)


class MapLineMachine(RuleBasedStateMachine):
    """A consumer that orders and takes, cores that make in any order, and blocks that get lost."""

    @initialize()
    def begin(self) -> None:
        self.line = MapLine()
        self.ordered = self.start = 0
        self.tasks: list[list[BatchOrder]] = []
        self.blocks: dict[int, list[BatchOrder]] = {}

    @rule(count=st.integers(1, 5))
    def orders(self, count: int) -> None:
        self.line.order([order(self.ordered + i) for i in range(count)])
        self.ordered += count

    @rule(count=st.integers(1, 4))
    def begins(self, count: int) -> None:
        if orders := self.line.begin(count):
            self.tasks.append(orders)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), node=st.sampled_from(NODES))
    def makes(self, data: Any, node: str) -> None:
        orders = self.tasks.pop(data.draw(st.integers(0, len(self.tasks) - 1)))
        ref = len(self.blocks)
        self.blocks[ref] = orders
        self.line.finish(orders, ref, node=node, size_bytes=10 * len(orders))

    @rule(want=st.integers(1, 6), loses=st.booleans())
    def takes(self, want: int, loses: bool) -> None:
        places = self.line.deliver(self.start, want)
        assert len(places) <= want
        for place in places:
            made = self.blocks[place.ref][place.item]
            assert made.number == self.start  # in order, each once
            if loses:
                self.line.lost(self.start)
                return
            self.start += 1

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not hasattr(self, "line"):
            return
        assert all(size >= 0 for size in self.line.held_bytes.values())
        under_way = {each.number for task in self.tasks for each in task}
        for number in range(self.start, self.ordered):
            known = number in under_way or number in self.line._wanted or number in self.line._finished
            assert known, f"batch {number} is neither wanted, under way nor made"

    def teardown(self) -> None:
        if not hasattr(self, "line"):
            return
        while self.start < self.ordered:  # every batch comes in the end, the next one first
            while orders := self.line.begin(3):
                self.tasks.append(orders)
            while self.tasks:
                self.makes_one()
            places = self.line.deliver(self.start, 100)
            assert places
            self.start += len(places)
        self.line.deliver(self.start, 1)
        assert self.line.held_bytes.total() == 0

    def makes_one(self) -> None:
        orders = self.tasks.pop()
        ref = len(self.blocks)
        self.blocks[ref] = orders
        self.line.finish(orders, ref, node="a", size_bytes=10 * len(orders))


TestMapLine = MapLineMachine.TestCase


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_workers_of_an_iterable_data_set_take_turns(shares: list[int], rng: Any) -> None:
    line = IterableLine(len(shares))
    left = list(shares)
    got: list[tuple[int, int]] = []
    ended: set[int] = set()
    while not line.over(len(got)):
        for place in line.deliver(len(got), rng.randint(1, 3)):
            got.append((place.ref, place.item))
        worker = rng.randrange(len(shares))
        if left[worker]:
            line.add(worker, BatchPlace(worker, shares[worker] - left[worker], "node"))
            left[worker] -= 1
        elif worker not in ended:
            ended.add(worker)
            line.end(worker)
    turns = max(shares)
    assert got == [(worker, turn) for turn in range(turns) for worker, share in enumerate(shares) if turn < share]
