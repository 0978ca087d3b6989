"""The tasks of a pass over units whose number of samples only running them tells, such as those of a ``ray.data.Dataset``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pyarrow as pa

from offload.errors import RunError
from offload.pipeline.meter import Meter
from offload.pipeline.pass_tasks import Issued, PassTasks
from offload.pipeline.passes import Pass
from offload.pipeline.pool import Block, Task
from offload.pipeline.ranges import Ranges
from offload.pipeline.sizing import block_bytes, for_speed, plan_tasks
from offload.pipeline.streams import Cores, Stream
from offload.pipeline.unit_ids import Trained, UnitIds

ROWS_UNKNOWN = 64  # of a unit, until the first ones were made


class UnitTasks(PassTasks):
    """The tasks of a pass over units. Each holds whole units: about as many rows as one of :class:`IndexTasks`."""

    def __init__(
        self, stream: Stream, units: pa.Table, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        super().__init__(current, meter)
        self._packed, self._units, self._cores = stream.recipe, units, cores
        ids = UnitIds(units.num_rows)
        try:
            self._trained = ids.trained(Ranges(current.request.done))
        except ValueError as error:
            raise RunError(
                f"the checkpoint's record of the epoch does not fit the data set: {error}. Begin a new run."
            ) from None
        order = stream.order(current.request.epoch)
        self._order = [unit for unit in order.tolist() if not (unit in self._trained and self._trained[unit].whole)]
        self._known = units.column("rows").to_pylist()
        self._cursor = 0
        self._planned: deque[int] = deque()
        self._seen_units = self._seen_rows = 0
        if not self._order:
            current.end()

    def exhausted(self) -> bool:
        return self._cursor >= len(self._order)

    def next(self, node: str) -> Issued | None:
        if self.exhausted():
            return None
        number = self._begin()
        if not self._planned:
            self._plan()
        size = for_speed(self._planned.popleft(), self._meter.over_fastest(node), self._local_batch_size)
        rows = self._rows_of(self._take(size))
        return self._issue(number, Task(recipe=self._packed, rows=rows, epoch=self._pass.request.epoch))

    def _take(self, size: int) -> list[int]:
        """The next units: at least one, and otherwise as many as come closest to ``size`` rows."""
        taken, rows = [self._order[self._cursor]], self._expected(self._order[self._cursor])
        self._cursor += 1
        while not self.exhausted():
            following = self._expected(self._order[self._cursor])
            if rows + following / 2 > size:
                break
            taken.append(self._order[self._cursor])
            rows += following
            self._cursor += 1
        return taken

    def _expected(self, unit: int) -> float:
        """The rows of a unit, about."""
        if (trained := self._trained.get(unit)) is not None:
            return trained.count - len(trained.done)
        if (rows := self._known[unit]) is not None:
            return float(rows)
        return self._seen_rows / self._seen_units if self._seen_units else ROWS_UNKNOWN

    def _rows_of(self, units: list[int]) -> pa.Table:
        trained = [self._trained.get(unit, Trained(-1, Ranges())) for unit in units]
        table = self._units.take(pa.array(units, pa.int64())).combine_chunks()
        table = table.append_column("unit", pa.array(units, pa.int64()))
        table = table.append_column("count", pa.array([t.count if t.count >= 0 else None for t in trained], pa.int64()))
        flat = [[edge for pair in t.done.pairs for edge in pair] for t in trained]
        return table.append_column("done", pa.array(flat, pa.list_(pa.int64())))

    @property
    def _local_batch_size(self) -> int:
        return self._pass.request.first_rows // self._pass.request.world_size

    def _plan(self) -> None:
        left = sum(map(self._expected, self._order[self._cursor :]))
        sizes = plan_tasks(
            max(round(left), 1),
            cores=self._cores().cores,
            first_rows=self._pass.request.first_rows,
            rates=self._meter.rates(),
            block_bytes=block_bytes(self._cores().store_bytes, self._cores().cores),
            local_batch_size=self._local_batch_size,
        )
        self._planned.extend(sizes)

    def _note(self, task: Task, made: Block) -> None:
        self._seen_units += task.rows.num_rows
        self._seen_rows += made.cost.rows
