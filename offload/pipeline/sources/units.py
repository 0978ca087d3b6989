"""Sources whose samples are known only once a unit of them is made, and the recipe that makes units in a preprocessing process.

Such a source is a ``ray.data.Dataset`` whose read tasks and functions the pool runs: filters and batch functions may return any number of
rows. Where it stops: :mod:`offload.pipeline.ray_plan` knows Ray's plans, and :mod:`offload.pipeline.unit_tasks` cuts a pass into tasks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import RunError
from offload.pipeline import recipe as recipes
from offload.pipeline.gather import Scratch
from offload.pipeline.randomness import seed_generators
from offload.pipeline.ranges import Ranges
from offload.pipeline.recipe import FAILURES, TRAINED, Recipe, say, whole_chunks
from offload.pipeline.shuffling import generator, mix
from offload.pipeline.sources.base import At, Samples, nowhere
from offload.pipeline.unit_ids import UnitIds
from offload.pipeline.watch import Watch
from offload.pipeline.wire import POSITION, SAMPLE_ID, Column, Columns, as_array, common_dtype

if TYPE_CHECKING:
    from offload.pipeline.ray_plan import Chain, Runner

UNIT, COUNT, DONE = "unit", "count", "done"
"""Columns of a task: the number of a unit, the samples that it gave before (-1: unknown), and the ranges of its trained places, flat."""


@dataclass(frozen=True, kw_only=True)
class UnitIndex:
    """The units of a source.

    ``table`` has a row for each: what its chain is given, the numbers of chain and rows (:class:`offload.pipeline.ray_plan.Unit`), and its
    label. ``samples``: their number in a pass, None if only running the source tells. ``identity`` is equal for sources with equal units.
    ``notes`` are for the user.
    """

    table: pa.Table
    chains: tuple[Chain, ...]
    samples: int | None
    identity: str
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> UnitIds:
        """The numbers of the samples."""
        return UnitIds(self.table.num_rows)


@dataclass(frozen=True, kw_only=True)
class UnitRecipe:
    """Everything that a task needs besides its units. ``inner`` transforms the samples that the chains make; ``id_column`` holds their
    ids, if the user numbers them."""

    inner: Recipe
    chains: tuple[Chain, ...]
    ids: UnitIds
    shuffle: bool
    id_column: str | None = None
    runners: dict[int, Runner] = field(default_factory=dict)

    def ready(self) -> UnitRecipe:
        """Prepare this recipe in this process: construct the classes of its steps and of its transform.

        Raises RunError for a class that raises.
        """
        from offload.pipeline.ray_plan import Runner  # it imports Ray Data, which most runs do not need

        try:
            runners = {number: Runner(chain) for number, chain in enumerate(self.chains)}
        except FAILURES as error:
            raise RunError(
                f"a class of the steps of a ray.data.Dataset raised {say(error)} when it was constructed on a preprocessing process. "
                "Correct its constructor: it runs on every node."
            ) from None
        return dataclasses.replace(self, inner=self.inner.ready(), runners=runners)

    def process(self, rows: pa.Table, *, epoch: int, scratch: Scratch, watch: Watch) -> pa.Table:
        """Return the block of these units, as :func:`offload.pipeline.recipe.process` does for index rows."""
        made = [self._made(unit, epoch, watch) for unit in rows.to_pylist()]
        tables = [self._index(number, each, epoch) for number, each in enumerate(made)]
        index = pa.concat_tables([table for table in tables if table.num_rows] or tables[:1])
        if not any(each.done.pairs for each in made):  # leaving rows out costs a copy of the block
            index = index.drop_columns([TRAINED])
        inner = dataclasses.replace(self.inner, reader=_Held(made, changed=self.inner.kind != "none"))
        return recipes.process(inner, index.combine_chunks(), epoch=epoch, scratch=scratch, watch=watch)

    def _made(self, unit: Mapping[str, Any], epoch: int, watch: Watch) -> _Made:
        """Run the steps of a unit, with random numbers of its own."""
        number, runner = unit[UNIT], self.runners[unit["chain"]]
        name = f"{unit['label']} of the ray.data.Dataset"
        watch.doing(lambda: f"making {name}{f' {self.inner.dataset!r}' if self.inner.dataset else ''}", None)
        seed_generators(mix(self.inner.seed, epoch, number, 4))
        errors: dict[int, str] = {}
        place = {"number": number, "start": unit["start"], "stop": unit["stop"]}
        try:
            pieces = runner.run(unit["given"], **place)
        except RunError:
            raise
        except FAILURES as error:
            if self.inner.on_error != "skip":
                raise RunError(
                    f"{runner.chain} raised {say_cause(error)} on {name}. Correct the step, leave such rows out, or pass "
                    'on_error="skip" to count them, list them in the run directory and go on.'
                ) from None
            columns, count, errors = self._row_by_row(runner, unit, place, epoch)
        else:
            columns = _joined(pieces)
            count = _length(columns)
        for column, values in columns.items():
            if len(values) != count:
                raise RunError(
                    f"{runner.chain} made columns of different lengths on {name}: {count} and {len(values)} rows ({column})."
                )
        for promised, source in ((unit["rows"], "its plan promises"), (unit[COUNT], "it made before")):
            if promised is not None and promised != count:
                raise RunError(
                    f"{runner.chain} made {count} rows of {name}, and {source} {promised}. Its steps must depend on their rows and "
                    "seeded random numbers alone, and map_batches(udf_modifying_row_count=False) return as many rows as it gets."
                )
        if count > self.ids.most:
            raise RunError(
                f"{name} gives {count:,} rows, more than {self.ids.most:,}. Read it in more blocks (override_num_blocks)."
            )
        ids = self.ids.samples(number, np.arange(count, dtype=np.int64))
        if self.id_column is not None and count > len(errors):
            ids = recipes.user_ids(_with_ids(columns, self.id_column, errors, ids), self.id_column)
            columns = {name: column for name, column in columns.items() if name != SAMPLE_ID}
        return _Made(
            number=number,
            label=unit["label"],
            columns=columns,
            count=count,
            ids=ids,
            errors=errors,
            done=_ranges(unit[DONE]),
        )

    def _row_by_row(
        self, runner: Runner, unit: Mapping[str, Any], place: Mapping[str, Any], epoch: int
    ) -> tuple[Columns, int, dict[int, str]]:
        """(columns, samples, errors) of a unit in which some rows fail: each of these is one sample, without content."""
        pieces: list[Columns] = []
        lengths: list[int] = []
        errors: dict[int, str] = {}

        def fail(error: BaseException, rows: int = 1) -> None:
            for row in range(sum(lengths), sum(lengths) + rows):
                errors[row] = f"its step raised {say_cause(error)}"
            pieces.append({})
            lengths.append(rows)

        seeds = itertools.count()
        seed_generators(mix(self.inner.seed, epoch, unit[UNIT], 6, next(seeds)))
        try:
            for found in runner.run_each(unit["given"], **place):
                if isinstance(found, Exception):
                    fail(found)
                else:
                    pieces.append(found)
                    lengths.append(_length(found))
                seed_generators(mix(self.inner.seed, epoch, unit[UNIT], 6, next(seeds)))
        except FAILURES as error:  # the input itself
            fail(error, max((unit["rows"] or 1) - sum(lengths), 1))
        return _joined(pieces, lengths), sum(lengths), errors

    def _index(self, place: int, made: _Made, epoch: int) -> pa.Table:
        """The index rows of a unit's samples that a task returns, and the trained rest of their chunks."""
        rows = np.arange(made.count, dtype=np.int64)
        if self.shuffle:
            rows = generator(mix(self.inner.seed, made.number, 5), epoch).permutation(made.count).astype(np.int64)
        places = np.arange(made.count, dtype=np.int64)
        if made.done.pairs:
            places = whole_chunks(made.done.missing_from(made.count), made.count)
        table = pa.table(
            {
                UNIT: np.full(len(places), place, dtype=np.int32),
                "row": rows[places],
                SAMPLE_ID: made.ids[rows[places]],
                POSITION: self.ids.positions(made.number, made.count, places),
            }
        )
        return table.append_column(TRAINED, pa.array(made.done.holds(places)))


@dataclass(frozen=True, kw_only=True)
class _Made:
    """The samples of a unit."""

    number: int
    label: str
    columns: Columns
    count: int
    ids: NDArray[np.int64]
    errors: Mapping[int, str]
    done: Ranges


class _Held:
    """A reader of samples that exist already. ``changed``: whether a transform may change them in place."""

    def __init__(self, made: Sequence[_Made], *, changed: bool) -> None:
        self._made, self._changed = made, changed

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        units, places = rows.column(UNIT).to_numpy(), rows.column("row").to_numpy()
        cuts = (np.flatnonzero(np.diff(units)) + 1).tolist()
        runs = list(itertools.pairwise([0, *cuts, len(units)]))
        pieces: list[Columns] = []
        errors: dict[int, str] = {}
        for start, stop in runs:
            unit = self._made[int(units[start])]
            pieces.append(_picked(unit.columns, places[start:stop], self._changed))
            for row in range(start, stop) if unit.errors else ():
                if (reason := unit.errors.get(int(places[row]))) is not None:
                    errors[row] = reason
        return Samples(_joined(pieces, [stop - start for start, stop in runs]), errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        unit, place = rows.column(UNIT)[row].as_py(), rows.column("row")[row].as_py()
        return f"row {place} of {self._made[unit].label}"


def _with_ids(columns: Columns, name: str, errors: Mapping[int, str], ids: NDArray[np.int64]) -> Columns:
    """The columns, with ids for rows that failed before they had one."""
    if name not in columns or not errors:
        return columns
    return {**columns, name: [ids[row] if row in errors else value for row, value in enumerate(columns[name])]}


def _own(column: Column) -> Column:
    return column.copy() if isinstance(column, np.ndarray) and not column.flags.writeable else column


def _picked(columns: Columns, rows: NDArray[np.int64], changed: bool) -> Columns:
    """These rows: views if they follow one another, but of memory that may be changed if ``changed``. A stored block is shared."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and np.all(np.diff(rows) == 1):
        found = {name: column[rows[0] : rows[-1] + 1] for name, column in columns.items()}
        return {name: _own(column) if changed else column for name, column in found.items()}
    return recipes.take(columns, rows)


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _joined(pieces: Sequence[Columns], lengths: Sequence[int] | None = None) -> Columns:
    """Pieces of columns, one after the other. A column that some lack holds None there. ``lengths``: the rows of each, if some have no
    columns."""
    if len(pieces) == 1:
        return pieces[0]
    names = dict.fromkeys(name for piece in pieces for name in piece)
    lengths = list(map(_length, pieces)) if lengths is None else lengths
    return {
        name: _column([piece.get(name, [None] * rows) for piece, rows in zip(pieces, lengths, strict=True)])
        for name in names
    }


def _column(parts: Sequence[Column]) -> Column:
    arrays = [as_array(part) for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        dtype = common_dtype(array.dtype for array in arrays)
        if dtype is not None:
            return np.concatenate(arrays, dtype=dtype)
    return [value for part in parts for value in part]


def _ranges(flat: Sequence[int] | None) -> Ranges:
    flat = flat or ()
    return Ranges(tuple(zip(flat[::2], flat[1::2], strict=True)))


def say_cause(error: BaseException) -> str:
    """The user's own error inside Ray's, without the advice that Ray appends to its text."""
    while error.__cause__ is not None:
        error = error.__cause__
    rest = str(error).partition("\n")[2]
    return say(error).replace(f"\n{rest}", "", 1) if rest else say(error)
