"""The tasks of a pass over an index: each a number of its rows, sized when a core takes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from offload.pipeline.calls import CHUNK
from offload.pipeline.chunks import whole_chunks
from offload.pipeline.index_rows import IndexRows, Picked, open_rows
from offload.pipeline.meter import Meter
from offload.pipeline.pass_tasks import PassTasks
from offload.pipeline.passes import Pass
from offload.pipeline.ranges import Missing, Ranges
from offload.pipeline.sizing import aligned
from offload.pipeline.streams import Cores, Stream


class IndexTasks(PassTasks):
    """The tasks of a pass over an indexed source. A task gets its size when a core takes it."""

    def __init__(
        self, stream: Stream, rows: IndexRows, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        super().__init__(stream, current, meter, cores)
        open_rows(rows)
        self._index = rows
        self._order = stream.order(current.request.epoch)
        self._positions = Ranges(current.request.done).missing_from(len(self._order))
        self._cursor = 0
        self._rows = [0] * current.request.world_size
        if not len(self._positions):
            current.end()

    def exhausted(self) -> bool:
        return self._cursor >= len(self._positions)

    def left(self) -> int:
        return len(self._positions) - self._cursor

    def _least(self) -> int:
        return _chunk_cut(self._positions, self._cursor, 1) - self._cursor

    def _cut(self, size: int, most: float) -> tuple[Picked, int]:
        # As the allotment will decide: the next block goes to the rank with the fewest rows.
        rank = self._rows.index(min(self._rows))
        size = aligned(size, self._rows[rank], self._local_batch_size)
        stop = _chunk_cut(self._positions, self._cursor, int(max(1, min(size, most - CHUNK + 1))))
        wanted = self._positions.between(self._cursor, stop)
        self._rows[rank] += len(wanted)
        self._cursor = stop
        # With the already trained rest of their chunks.
        whole = whole_chunks(wanted, len(self._order))
        parts = [self._order[start:end] for start, end in whole.pairs]
        # One part is a view: the pass keeps every task until its end.
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Picked(ids=ids, source=self._index, positions=whole, wanted=wanted), len(wanted)


def _chunk_cut(positions: Missing, start: int, size: int) -> int:
    """The end of a task of about ``size`` rows from ``start`` on; it is never inside a transform's chunk."""
    cut = min(start + size, len(positions))
    chunks = positions[cut - 1 : cut + CHUNK] // CHUNK  # a chunk ends within so many
    return cut - 1 + int(np.count_nonzero(chunks == chunks[0]))
