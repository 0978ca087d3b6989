"""The batches of one iteration on their way, from the order to the delivery. Pure: it knows no Ray and no threads.

Batches are made in any order and delivered in the order of their numbers. A delivered batch stays known until the consumer asks for a
later one: its node may be lost before the consumer has it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.loader.batch_recipe import BatchOrder


class BatchPlace(NamedTuple):
    """The place of a batch: number ``item`` of the block behind a reference, which a node made."""

    ref: Any
    item: int
    node: str


@dataclass(frozen=True, kw_only=True)
class _FinishedBatch:
    """A finished batch, with its size in its node's object store."""

    place: BatchPlace
    size_bytes: int


class MapLine:
    """The batches of an iteration over a map-style data set, whose consumer sends the orders."""

    def __init__(self) -> None:
        self.held_bytes = Counter[str]()  # by node, of batches from the newest request on
        self._orders: dict[int, BatchOrder] = {}  # of batches that the consumer may still need
        self._wanted: deque[int] = deque()
        self._under_way: set[int] = set()
        self._finished: dict[int, _FinishedBatch] = {}
        self._next = 0

    @property
    def wanted(self) -> int:
        """The number of batches that no task makes yet."""
        return len(self._wanted)

    @property
    def ahead(self) -> int:
        """The number of batches that are made or under way."""
        return len(self._finished) + len(self._under_way)

    @property
    def starving(self) -> bool:
        """Whether the consumer's next batch is ordered, and no task is making it."""
        return bool(self._wanted) and self._wanted[0] == self._next

    def order(self, orders: list[BatchOrder]) -> None:
        """Add orders."""
        for order in orders:
            self._orders[order.number] = order
            self._wanted.append(order.number)
        if any(one > other for one, other in itertools.pairwise(self._wanted)):  # messages may overtake each other
            self._wanted = deque(sorted(self._wanted))

    def begin(self, count: int) -> list[BatchOrder]:
        """Up to ``count`` orders for a task, which is under way from now on."""
        numbers = [self._wanted.popleft() for _ in range(min(count, len(self._wanted)))]
        self._under_way.update(numbers)
        return [self._orders[number] for number in numbers]

    def again(self, orders: list[BatchOrder]) -> None:
        """Make these batches again, before all others: the task that made them has died."""
        self._under_way.difference_update(order.number for order in orders)
        self._wanted.extendleft(order.number for order in reversed(orders))

    def finish(self, orders: list[BatchOrder], ref: Any, *, node: str, size_bytes: int) -> None:
        """Note that a task has made these batches."""
        for item, order in enumerate(orders):
            self._under_way.discard(order.number)
            if order.number >= self._next and order.number not in self._finished:
                batch = _FinishedBatch(place=BatchPlace(ref, item, node), size_bytes=size_bytes // len(orders))
                self._finished[order.number] = batch
                self.held_bytes[node] += batch.size_bytes

    def deliver(self, start: int, want: int) -> list[BatchPlace]:
        """Up to ``want`` batches from number ``start`` on, as far as they are ready. The consumer has all batches before."""
        for number in range(self._next, start):
            self._orders.pop(number, None)
            self._forget(number)
        self._next = max(self._next, start)
        places = []
        for number in range(start, start + want):
            if number not in self._finished:
                break
            places.append(self._finished[number].place)
        return places

    def lost(self, number: int) -> None:
        """Make a batch again, before all others: its block is gone with a node."""
        if number in self._orders and number not in self._under_way and number not in self._wanted:
            self._forget(number)
            self._wanted.appendleft(number)

    def over(self, start: int) -> bool:
        """Return whether there are no batches from number ``start`` on. Only the consumer knows."""
        return False

    def _forget(self, number: int) -> None:
        batch = self._finished.pop(number, None)
        if batch is not None:
            self.held_bytes[batch.place.node] -= batch.size_bytes


class IterableLine:
    """The batches of an iteration over an iterable data set, from its workers in turn, as in torch.

    A worker that has ended loses its turn.
    """

    def __init__(self, workers: int) -> None:
        self._queues: list[deque[BatchPlace]] = [deque() for _ in range(workers)]
        self._ended = [False] * workers
        self._turn = 0
        self._delivered: deque[BatchPlace] = deque()  # the batches from number _next on
        self._next = 0

    def add(self, worker: int, place: BatchPlace) -> None:
        """Add the next batch of a worker."""
        self._queues[worker].append(place)

    def end(self, worker: int) -> None:
        """Note that this worker has no more batches."""
        self._ended[worker] = True

    def has_ended(self, worker: int) -> bool:
        """Return whether this worker has no more batches."""
        return self._ended[worker]

    def waiting(self, worker: int) -> int:
        """The number of a worker's batches that wait for their turn."""
        return len(self._queues[worker])

    def deliver(self, start: int, want: int) -> list[BatchPlace]:
        """See :meth:`MapLine.deliver`."""
        while self._next < start and self._delivered:
            self._delivered.popleft()
            self._next += 1
        while len(self._delivered) < want and (place := self._in_turn()) is not None:
            self._delivered.append(place)
        return list(self._delivered)[:want]

    def over(self, start: int) -> bool:
        """Return whether there are no batches from number ``start`` on."""
        return all(self._ended) and not any(self._queues) and start >= self._next + len(self._delivered)

    def _in_turn(self) -> BatchPlace | None:
        """The next batch, if it is ready."""
        for _ in self._queues:
            queue = self._queues[self._turn]
            if queue:
                self._turn = (self._turn + 1) % len(self._queues)
                return queue.popleft()
            if not self._ended[self._turn]:
                return None
            self._turn = (self._turn + 1) % len(self._queues)
        return None
