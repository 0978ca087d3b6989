"""Chunks of a pass: runs of positions whose samples draw their random numbers together, whoever makes them.

Random numbers belong to a sample, or to a chunk of :data:`CHUNK` samples if a function takes several at once. They must not depend on the
cut of a pass into tasks and calls. As long as a recipe draws none, a call may take many chunks, which costs light rows a fraction of the
time. A task that draws nevertheless begins again chunk by chunk, with seeds, and so do all later ones (:class:`Calls`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from offload.pipeline.order.ranges import Missing, Ranges

CHUNK = 16
"""The rows that draw random numbers together. Chunks begin at multiples of it in the pass. It is small, so that a chunk of images stays in
the core's cache."""

LONG_S = 0.05  # duration of a call
# Bytes that a call reads and returns: about two cores' caches, a balance with the cost of each call
LARGE_BYTES = 2 << 20
MOST_ROWS = 8192


class Calls:
    """The size of a recipe's calls in this process.

    Attributes:
        seeded: whether each sample and chunk gets random numbers of its own.
        drew: whether the call under way has drawn random numbers.
        nbytes: the bytes that the call under way has read and returned.
    """

    def __init__(self) -> None:
        self.seeded, self.drew, self.nbytes = True, False, 0
        self._rows = CHUNK
        self._fixed = False
        self._short = False  # the call under way has fewer rows than it might, since a task ends

    @property
    def watching(self) -> bool:
        """Whether it still matters if a call draws random numbers."""
        return not self._fixed

    def fix(self) -> None:
        """Seed all later calls, each of a chunk."""
        self._fixed, self.seeded, self._rows = True, True, CHUNK

    def restart(self) -> None:
        """Seed the next call, and watch it."""
        if not self._fixed:
            self.seeded, self._rows = True, CHUNK

    def stop(self, ends: np.ndarray[tuple[int], np.dtype[np.int64]], start: int) -> int:
        """The end of the call that begins at ``start``. ``ends``: the ends of all chunks, ascending."""
        first = int(np.searchsorted(ends, start, side="right"))
        self._short = int(ends[-1]) < start + self._rows
        if self.seeded:  # exactly one chunk, even where short chunks at the end of a unit would fit together
            return int(ends[first])
        last = int(np.searchsorted(ends, start + self._rows, side="right")) - 1
        return int(ends[max(first, last)])

    def begin(self) -> None:
        """Note the beginning of a call."""
        self.drew, self.nbytes = False, 0

    def done(self, seconds: float) -> bool:
        """Note the end of a call. Return whether its result counts; otherwise the rows need another call."""
        if self._fixed:
            return True
        if self.drew:
            counts = self.seeded
            self.fix()
            return counts
        self.seeded = False
        if not self._short and seconds < LONG_S / 2 and self.nbytes < LARGE_BYTES / 2:
            self._rows = min(2 * self._rows, MOST_ROWS)
        elif (seconds > 2 * LONG_S or self.nbytes > 2 * LARGE_BYTES) and self._rows > CHUNK:
            self._rows = max(self._rows // 2, CHUNK)
        return True


TRAINED = "__trained__"
"""A column of index rows that exists where a resume cuts a chunk: True for rows that were trained before. The task processes them
with the rest of their chunk, since only a whole chunk draws the same random numbers, but does not return them."""


def whole_chunks(positions: Ranges, n: int) -> Ranges:
    """Every position below ``n`` in the chunks of these positions."""
    whole = [(start // CHUNK * CHUNK, min(-(-stop // CHUNK) * CHUNK, n)) for start, stop in positions.pairs]
    return Ranges.of_all([Ranges(tuple(whole))])


def chunk_end(positions: Missing, place: int) -> int:
    """The first place at ``place`` or behind it that is not inside a chunk: with the position before it, a chunk ends."""
    if place <= 0:
        return 0
    chunks = positions[place - 1 : place + CHUNK] // CHUNK  # long enough to reach the end of the chunk
    return place - 1 + int(np.count_nonzero(chunks == chunks[0]))


def untrained(rows: pa.Table) -> np.ndarray[Any, Any]:
    """The numbers of the index rows that a task returns: all but those marked as :data:`TRAINED`."""
    if TRAINED not in rows.column_names:
        return np.arange(rows.num_rows)
    return np.flatnonzero(~rows.column(TRAINED).to_numpy())
