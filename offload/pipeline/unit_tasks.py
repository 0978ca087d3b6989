"""The tasks of a pass over units whose number of samples only running them tells, such as those of a ``ray.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from offload.errors import RunError
from offload.pipeline.meter import Meter
from offload.pipeline.pass_tasks import PassTasks
from offload.pipeline.passes import Pass
from offload.pipeline.pool import Block, Task
from offload.pipeline.ranges import Ranges
from offload.pipeline.streams import Cores, Stream
from offload.pipeline.unit_ids import Trained, UnitIds

ROWS_UNKNOWN = 64  # of a unit, until the first ones were made


class UnitTasks(PassTasks):
    """The tasks of a pass over units. Each holds whole units: about as many rows as one of :class:`IndexTasks`."""

    def __init__(
        self, stream: Stream, units: pa.Table, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        super().__init__(stream, current, meter, cores)
        self._units = units
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
        self._seen_units = self._seen_rows = 0
        known = [self._rows_in(unit) for unit in self._order]
        self._known_left = sum(rows for rows in known if rows is not None)
        self._unknown_left = known.count(None)
        if not self._order:
            current.end()

    def exhausted(self) -> bool:
        return self._cursor >= len(self._order)

    def left(self) -> int:
        return max(round(self._known_left + self._usual() * self._unknown_left), 1)

    def _least(self) -> int:
        return round(self._expected(self._order[self._cursor]))

    def _cut(self, size: int, most: float) -> tuple[pa.Table, int]:
        """The next units: at least one, and otherwise as many as come closest to ``size`` rows."""
        taken, rows = [self._order[self._cursor]], self._expected(self._order[self._cursor])
        self._cursor += 1
        # Behind a filter, units may hold next to nothing, and one core would take all that are left.
        share = max((len(self._order) - self._cursor) // (2 * max(self._cores().cores, 1)), 1)
        while not self.exhausted():
            following = self._expected(self._order[self._cursor])
            if rows + following / 2 > size or rows + following > most:
                break
            # Before the first was made, a unit may hold a handful of rows or millions.
            if self._rows_in(self._order[self._cursor]) is None and (len(taken) >= share or not self._seen_units):
                break
            taken.append(self._order[self._cursor])
            rows += following
            self._cursor += 1
        known = [self._rows_in(unit) for unit in taken]
        self._known_left -= sum(each for each in known if each is not None)
        self._unknown_left -= known.count(None)
        return self._rows_of(taken), round(rows)

    def _expected(self, unit: int) -> float:
        """The rows of a unit, about."""
        if (rows := self._rows_in(unit)) is not None:
            return float(rows)
        return self._usual()

    def _usual(self) -> float:
        """The rows of a unit of which nothing is known, about."""
        return self._seen_rows / self._seen_units if self._seen_rows else ROWS_UNKNOWN

    def _rows_in(self, unit: int) -> int | None:
        """The rows of a unit that are not trained yet; None if only making it tells."""
        if (trained := self._trained.get(unit)) is not None:
            return trained.count - len(trained.done)
        rows: int | None = self._known[unit]
        return rows

    def _rows_of(self, units: list[int]) -> pa.Table:
        trained = [self._trained.get(unit, Trained(-1, Ranges())) for unit in units]
        table = self._units.take(pa.array(units, pa.int64())).combine_chunks()
        table = table.append_column("unit", pa.array(units, pa.int64()))
        table = table.append_column("count", pa.array([t.count if t.count >= 0 else None for t in trained], pa.int64()))
        flat = [[edge for pair in t.done.pairs for edge in pair] for t in trained]
        return table.append_column("done", pa.array(flat, pa.list_(pa.int64())))

    def _note(self, task: Task, made: Block) -> None:
        self._seen_units += task.rows.num_rows
        self._seen_rows += made.cost.rows
