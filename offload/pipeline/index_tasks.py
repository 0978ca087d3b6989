"""The tasks of a pass over an index: each a number of its rows, sized when a core takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.pipeline.calls import CHUNK
from offload.pipeline.meter import Meter
from offload.pipeline.pass_tasks import Issued, PassTasks
from offload.pipeline.passes import Pass
from offload.pipeline.pool import Task
from offload.pipeline.ranges import Ranges
from offload.pipeline.recipe import TRAINED, whole_chunks
from offload.pipeline.sizing import aligned, block_bytes, for_speed, plan_tasks
from offload.pipeline.streams import Cores, Stream
from offload.pipeline.wire import POSITION, SAMPLE_ID


class IndexTasks(PassTasks):
    """The tasks of a pass over an indexed source. A task gets its size when a core takes it."""

    def __init__(
        self, stream: Stream, table: pa.Table, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        super().__init__(current, meter)
        self._table, self._packed, self._cores = table, stream.recipe, cores
        self._order = stream.order(current.request.epoch)
        self._positions = Ranges(current.request.done).missing_from(len(self._order))
        self._cursor = 0
        self._planned: deque[int] = deque()
        self._rows = [0] * current.request.world_size
        self._local_batch_size = current.request.first_rows // current.request.world_size
        if not len(self._positions):
            current.end()

    def exhausted(self) -> bool:
        return self._cursor >= len(self._positions)

    def next(self, node: str) -> Issued | None:
        if self.exhausted():
            return None
        number = self._begin()
        if not self._planned:
            self._plan()
        # As the allotment will decide: the next block goes to the rank with the fewest rows.
        rank = self._rows.index(min(self._rows))
        size = for_speed(self._planned.popleft(), self._meter.over_fastest(node), self._local_batch_size)
        size = aligned(min(size, self._most_rows(node)), self._rows[rank], self._local_batch_size)
        stop = _chunk_cut(self._positions, self._cursor, size)
        places = self._positions[self._cursor : stop]
        self._rows[rank] += stop - self._cursor
        self._cursor = stop
        return self._issue(
            number, Task(recipe=self._packed, rows=self._rows_of(places), epoch=self._pass.request.epoch)
        )

    def _rows_of(self, places: NDArray[np.int64]) -> pa.Table:
        """The index rows at these positions of the pass, and the already trained rest of their chunks (see :data:`TRAINED`)."""
        whole = whole_chunks(places, len(self._order))
        ids = self._order[whole]
        rows = self._table.take(pa.array(ids)).combine_chunks()
        rows = rows.append_column(SAMPLE_ID, pa.array(ids)).append_column(POSITION, pa.array(whole))
        if len(whole) > len(places):
            rows = rows.append_column(TRAINED, pa.array(~np.isin(whole, places)))
        return rows

    def _most_rows(self, node: str) -> int:
        """The most rows of a block that fit in this node's share of the object store."""
        rates, cores = self._meter.rates(), self._cores()
        if rates is None or node not in cores.stores:
            return len(self._positions)
        room = block_bytes(cores.stores[node], max(cores.by_node[node], 1))
        return max(1, int(room / max(rates.bytes_per_sample, 1.0)))

    def _plan(self) -> None:
        sizes = plan_tasks(
            len(self._positions) - self._cursor,
            cores=self._cores().cores,
            first_rows=self._pass.request.first_rows,
            rates=self._meter.rates(),
            block_bytes=block_bytes(self._cores().store_bytes, self._cores().cores),
            local_batch_size=self._local_batch_size,
        )
        self._planned.extend(sizes)


def _chunk_cut(positions: np.ndarray[Any, Any], start: int, size: int) -> int:
    """The end of a task of about ``size`` rows from ``start`` on; it is never inside a transform's chunk."""
    cut = min(start + size, len(positions))
    while cut < len(positions) and positions[cut] // CHUNK == positions[cut - 1] // CHUNK:
        cut += 1
    return cut
