"""Sets of positions as sorted half-open ranges. They record what a pass has trained, in little space in every checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """An immutable set of int64, held as ``((start, stop), ...)``: sorted, disjoint, none adjacent, none empty."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ids: Iterable[int] | Ids) -> Ranges:
        """The set of these numbers, in any order, repetitions allowed."""
        values = ids.astype(np.int64, copy=False) if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)
        if values.size == 0:
            return cls()
        if values[-1] - values[0] == values.size - 1 and (values[1:] > values[:-1]).all():
            return cls(((int(values[0]), int(values[-1]) + 1),))  # a run, as most batches are: sorting takes far longer
        # unique() also sorts, on which the search for breaks relies.
        values = np.unique(values)
        breaks = np.flatnonzero(np.diff(values) != 1)
        starts = values[np.concatenate(([0], breaks + 1))]
        stops = values[np.concatenate((breaks, [values.size - 1]))] + 1
        return cls(tuple(zip(starts.tolist(), stops.tolist(), strict=True)))

    @classmethod
    def from_list(cls, pairs: Sequence[Sequence[int]]) -> Ranges:
        """The inverse of :meth:`to_list`. Raises ValueError if the pairs are not sorted, disjoint and non-empty."""
        checked = tuple((int(a), int(b)) for a, b in pairs)
        flat = [x for pair in checked for x in pair]
        if any(x >= y for x, y in pairwise(flat)):
            raise ValueError("ranges must be sorted, disjoint, not adjacent and not empty")
        return cls(checked)

    def to_list(self) -> list[list[int]]:
        """``[[start, stop], ...]``, plain enough for JSON and for ``torch.load(weights_only=True)``."""
        return [[a, b] for a, b in self.pairs]

    @classmethod
    def of_all(cls, parts: Iterable[Ranges]) -> Ranges:
        """Everything in any of these sets."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(pair for part in parts for pair in part.pairs):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return cls(tuple(merged))

    def union(self, other: Ranges) -> Ranges:
        """Everything in either set."""
        return Ranges.of_all((self, other))

    def missing_from(self, n: int) -> Missing:
        """The numbers of ``range(n)`` that are not in the set."""
        inside = [(max(start, 0), min(stop, n)) for start, stop in self.pairs if stop > 0 and start < n]
        # What lies between two ranges is missing: each one's stop begins a gap, and the next one's start ends it.
        starts, stops = [0, *(stop for _, stop in inside)], [*(start for start, _ in inside), n]
        return Missing(np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))

    def holds(self, values: Ids) -> NDArray[np.bool_]:
        """A mask of the values that are in the set."""
        if not self.pairs:
            return np.zeros(len(values), dtype=bool)
        bounds = np.array(self.pairs, dtype=np.int64)
        at = np.searchsorted(bounds[:, 0], values, side="right") - 1
        held: NDArray[np.bool_] = (at >= 0) & (values < bounds[np.maximum(at, 0), 1])
        return held

    def numbers(self) -> Ids:
        """All numbers of the set, ascending."""
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in self.pairs]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.pairs)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | np.integer) and any(a <= value < b for a, b in self.pairs)


class Missing:
    """Ascending numbers, in the space of the ranges that they form. Made by :meth:`Ranges.missing_from`."""

    def __init__(self, starts: Ids, stops: Ids) -> None:
        # A range at 0, or one that ends at n, leaves an empty gap.
        some = stops > starts
        self._starts, self._stops = starts[some], stops[some]
        self._ends = np.cumsum(self._stops - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def between(self, start: int, stop: int) -> Ranges:
        """The numbers at the places ``start`` to ``stop``, from 0 on, without ``stop``."""
        start, stop = max(start, 0), min(stop, len(self))
        if start >= stop:
            return Ranges()
        first, last = (int(np.searchsorted(self._ends, place, side="right")) for place in (start, stop - 1))
        starts, stops = self._starts[first : last + 1].tolist(), self._stops[first : last + 1].tolist()
        # Cut the first and the last range to the wanted places. From the end in both cases, so that it also holds
        # where they are one range.
        starts[0] = stops[0] - (int(self._ends[first]) - start)
        stops[-1] -= int(self._ends[last]) - stop
        return Ranges(tuple(zip(starts, stops, strict=True)))

    def __getitem__(self, places: slice) -> Ids:
        start, stop, step = places.indices(len(self))
        assert step == 1
        return self.between(start, stop).numbers()
