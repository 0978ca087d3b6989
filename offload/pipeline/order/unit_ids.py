"""Numbers for samples that come in units whose size is known only once a unit is made.

A position packs three numbers: the unit, the number of its samples, and the place among these. So the positions in a checkpoint alone show
which units are complete, and a resumed pass does not make them again. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.pipeline.order.ranges import Ranges

Ids = NDArray[np.int64]
BITS = 62  # bits of a position, so that it is never negative as int64


@dataclass(frozen=True)
class TrainedPart:
    """The part of a unit that was trained: the places ``done`` among its ``count`` samples."""

    count: int
    done: Ranges

    @property
    def whole(self) -> bool:
        """Whether all samples of the unit were trained."""
        return self.done.pairs == ((0, self.count),)


@dataclass(frozen=True)
class UnitIds:
    """The numbers of the samples of ``units`` units."""

    units: int

    @property
    def bits(self) -> int:
        """The bits of a place, and of a count."""
        # From the high bits down: unit, count, place. Count and place get equal shares of what the unit's number
        # leaves.
        return (BITS - max(self.units - 1, 1).bit_length()) // 2

    @property
    def most(self) -> int:
        """The most samples of a unit."""
        return (1 << self.bits) - 1

    def samples(self, unit: int, rows: Ids) -> Ids:
        """The sample ids of these rows of a unit."""
        return rows + (unit << self.bits)

    def positions(self, unit: int, count: int, places: Ids) -> Ids:
        """The positions of these places in a unit that gave ``count`` samples."""
        return places + (unit << 2 * self.bits | count << self.bits)

    def trained(self, positions: Ranges) -> dict[int, TrainedPart]:
        """The trained part of each unit, by its number.

        Raises ValueError for positions that this pass cannot have.
        """
        by_unit: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for start, stop in positions.pairs:
            unit, rest = start >> 2 * self.bits, start & (1 << 2 * self.bits) - 1
            count, first = rest >> self.bits, rest & self.most
            # A range never spans two units: behind a unit's last place comes another count.
            last = first + stop - start
            known, pairs = by_unit.setdefault(unit, (count, []))
            if unit >= self.units or known != count or last > count:
                raise ValueError(f"position {start} of {self.units} units: unit {unit}, {count} samples, place {first}")
            pairs.append((first, last))
        return {unit: TrainedPart(count, Ranges(tuple(pairs))) for unit, (count, pairs) in by_unit.items()}
