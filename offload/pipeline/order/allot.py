"""The allotment of block rows to ranks, where every row goes to one rank and all ranks get equally many.

Each whole block goes to one host, if possible to the one that made it. Only the last few blocks of a pass are cut, to level the ranks.
Pure: row counts in, shares out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NEAR_AHEAD = 2
"""The number of blocks by which a rank may get ahead of the others with blocks of its own node."""


@dataclass(frozen=True)
class Share:
    """Rows ``[start, stop)`` of the pass's ``block``-th block go to ``rank``."""

    block: int
    rank: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Allotment:
    """The allotment of one pass, block by block in their order.

    If ``total`` is known, each rank has a quota of ``total / world_size`` rows, give or take one. Otherwise, the allotment holds
    back the last ``world_size`` blocks until the pass ends, and then cuts them to level the ranks.
    """

    def __init__(self, world_size: int, total: int | None) -> None:
        self.rows = [0] * world_size
        self._quota = None if total is None else level([0] * world_size, total)
        self._held: deque[tuple[int, int, Collection[int]]] = deque()
        self._blocks = 0

    def add(self, rows: int, near: Collection[int] = ()) -> list[Share]:
        """The shares that become known with the next block, of ``rows`` rows. ``near``: the ranks on the node that made it."""
        block, self._blocks = self._blocks, self._blocks + 1
        if self._quota is not None:
            if rows > sum(self._quota) - sum(self.rows):
                raise ValueError(f"a pass of {sum(self._quota)} rows got {sum(self.rows) + rows}")
            return self._cut(block, rows, self._quota, near)
        # Until the pass ends, any block may be one of the last, which level the ranks. As many as there are ranks are
        # enough for that.
        self._held.append((block, rows, near))
        if len(self._held) <= len(self.rows):
            return []
        oldest, count, near = self._held.popleft()
        rank = self._next(range(len(self.rows)), near, count)
        self.rows[rank] += count
        return [Share(oldest, rank, 0, count)] if count else []

    def finish(self) -> list[Share]:
        """The blocks held back, cut so that all ranks get equally many rows. Empty if ``total`` is known."""
        goal = level(self.rows, sum(rows for _, rows, _ in self._held))
        # The goal of a rank is never below what it already has, so no row is taken back.
        shares = [share for block, rows, near in self._held for share in self._cut(block, rows, goal, near)]
        self._held.clear()
        return shares

    def _next(self, ranks: Sequence[int], near: Collection[int], rows: int) -> int:
        """The rank with the fewest rows, or a near one that is not far ahead of it."""
        poorest = min(ranks, key=lambda rank: self.rows[rank])
        nearest = min((rank for rank in ranks if rank in near), key=lambda rank: self.rows[rank], default=poorest)
        return nearest if self.rows[nearest] - self.rows[poorest] < NEAR_AHEAD * rows else poorest

    def _cut(self, block: int, rows: int, goal: list[int], near: Collection[int]) -> list[Share]:
        shares: list[Share] = []
        start = 0
        while start < rows:
            rank = self._next([k for k in range(len(goal)) if self.rows[k] < goal[k]], near, rows)
            stop = min(rows, start + goal[rank] - self.rows[rank])
            shares.append(Share(block, rank, start, stop))
            self.rows[rank] += stop - start
            start = stop
        return shares


class Stripes:
    """An allotment that deals out every global batch of ``batch`` rows in contiguous parts, rank by rank, in the order of the pass
    of ``total`` rows. The i-th global batch holds the same rows for any number of ranks and wherever blocks end.

    ``world_size`` must divide ``batch``. The rows after the last whole batch form one more, smaller batch.
    """

    def __init__(self, world_size: int, batch: int, total: int) -> None:
        if batch % world_size:
            raise ValueError(f"{world_size} ranks cannot share batches of {batch} rows equally")
        self._batch, self._total, self._at, self._blocks = batch, total, 0, 0
        self._whole = level([0] * world_size, batch)
        self._last = level([0] * world_size, total % batch)

    def add(self, rows: int, near: Collection[int] = ()) -> list[Share]:
        """The shares of the next block, of ``rows`` rows, whichever ranks are ``near``."""
        block, self._blocks = self._blocks, self._blocks + 1
        if self._at + rows > self._total:
            raise ValueError(f"a pass of {self._total} rows got {self._at + rows}")
        shares: list[Share] = []
        start = 0
        while start < rows:
            # The place alone decides on the rank. So neither the blocks nor the order in which they are made matter.
            number, offset = divmod(self._at, self._batch)
            parts = self._whole if number < self._total // self._batch else self._last
            # A linear search, since there are few ranks in comparison with the rows of a block.
            rank, end = 0, parts[0]
            while offset >= end:
                rank, end = rank + 1, end + parts[rank + 1]
            stop = min(rows, start + end - offset)
            shares.append(Share(block, rank, start, stop))
            self._at += stop - start
            start = stop
        return shares

    def finish(self) -> list[Share]:
        """An empty list: nothing is held back."""
        return []


def level(rows: list[int], extra: int) -> list[int]:
    """``rows`` after ``extra`` more rows have filled up the lowest counts, as evenly as whole rows allow."""
    goal = list(rows)
    while extra > 0:
        # Raise the lowest counts together: up to the next higher count, or as far as the rows suffice.
        lowest = min(goal)
        low = [k for k, r in enumerate(goal) if r == lowest]
        above = min((r for r in goal if r > lowest), default=None)
        step = extra // len(low) if above is None else min(extra // len(low), above - lowest)
        if step == 0:
            for k in low[:extra]:
                goal[k] += 1
            return goal
        for k in low:
            goal[k] += step
        extra -= step * len(low)
    return goal
