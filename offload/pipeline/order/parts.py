"""The part of a pass that one of several feeds hands out.

It follows from the ranks of the feed, and from what was trained before the pass, and so from nothing that time decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offload.pipeline.order.chunks import chunk_end
from offload.pipeline.order.ranges import Missing, Ranges


@dataclass(frozen=True)
class Part:
    """The part of a pass for the ranks from ``start`` on, without ``stop``, of all ``of`` ranks."""

    start: int = 0
    stop: int = 1
    of: int = 1

    @property
    def whole(self) -> bool:
        """Whether it is the whole pass."""
        return (self.start, self.stop) == (0, self.of)

    @property
    def ranks(self) -> int:
        """The number of its ranks."""
        return self.stop - self.start

    def missing(self, done: Ranges, n: int) -> Missing:
        """The positions below ``n`` of this part that are not ``done``.

        What is left is divided, and not the pass: another number of feeds may have trained most of a pass's beginning. Parts consist of
        whole chunks, as far as these are left. The parts of ranks that follow one another follow one another, and cover all.
        """
        left = done.missing_from(n)
        if self.whole:
            return left
        bounds = [chunk_end(left, len(left) * rank // self.of) for rank in (self.start, self.stop)]
        pairs = np.array(left.between(*bounds).pairs, dtype=np.int64).reshape(-1, 2)
        return Missing(pairs[:, 0], pairs[:, 1])


WHOLE = Part()
"""The part of a feed that serves all ranks, whatever their number."""
