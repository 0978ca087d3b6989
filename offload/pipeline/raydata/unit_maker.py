"""Makes the units of a ``ray.data.Dataset`` in a preprocessing process: runs the read task and the steps of each.

Where it stops: :mod:`offload.ray_private.data.dataset_plan` knows Ray's plans. The samples go to the recipe of a pass over units
(:mod:`offload.pipeline.raydata.units`), or to the reader of an index of rows (:mod:`offload.pipeline.raydata.dataset_source`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offload.errors import FAILURES, RunError
from offload.pipeline.blocks.values import own_column
from offload.pipeline.blocks.wire import Column, Columns, as_array, common_dtype, listed, parts_of_columns, take, typed
from offload.pipeline.index.source import Samples
from offload.pipeline.order.shuffling import mix
from offload.pipeline.preprocessing.block import Gather, Scratch
from offload.pipeline.preprocessing.randomness import seed_generators
from offload.pipeline.preprocessing.wording import say

if TYPE_CHECKING:
    from offload.pipeline.raydata.runner import Chain, Runner


@dataclass(frozen=True, kw_only=True)
class UnitSamples:
    """The samples of a unit. ``errors`` maps the number of a sample without content to its error."""

    label: str
    columns: Columns
    count: int
    errors: Mapping[int, str]


class UnitMaker:
    """The steps of all units, ready in this process."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        """Construct the classes of the steps. Raises RunError for a class that raises."""
        from offload.pipeline.raydata.runner import Runner  # it imports Ray Data, which most runs do not need

        try:
            constructed: dict[int, Any] = {}
            self._runners = [Runner(chain, constructed) for chain in chains]
        except FAILURES as error:
            raise RunError(
                f"a class of the steps of a ray.data.Dataset raised {say(error)} when it was constructed on a preprocessing process. "
                "Correct its constructor: it runs on every node."
            ) from None

    def make(self, unit: Mapping[str, Any], number: int, *, seed: int, epoch: int, skip: bool) -> UnitSamples:
        """Run the steps of a unit (a row of a :class:`UnitIndex`'s table), with random numbers of its own.

        ``skip``: whether rows that fail become samples without content. Raises RunError if they must not, or if the unit does not hold
        the promised rows.
        """
        runner = self._runners[unit["chain"]]
        name = unit_name(unit["label"])
        seed_generators(mix(seed, epoch, number, 4))
        errors: dict[int, str] = {}
        place = {"number": number, "start": unit["start"], "stop": unit["stop"]}
        pieces = _Pieces(expected_rows(unit))
        try:
            for piece in runner.run(unit["packed_input"], **place):
                pieces.add(piece)
        except RunError:
            raise
        except FAILURES as error:
            if not skip:
                raise RunError(
                    f"{runner.chain} raised {say_cause(error)} on {name}. Correct the step, leave such rows out, or pass "
                    'on_error="skip" to count them, list them in the run directory and go on.'
                ) from None
            # Only now: a step that gets single rows is far slower, and may see other batches.
            columns, count, errors = _row_by_row(runner, unit, place, mix(seed, epoch, number, 6))
        else:
            columns = pieces.joined()
            count = _length(columns)
        for column, values in columns.items():
            if len(values) != count:
                raise RunError(
                    f"{runner.chain} made columns of different lengths on {name}: {count} and {len(values)} rows ({column})."
                )
        for promised, source in ((unit["rows"], "its plan promises"), (unit.get(COUNT), "it made before")):
            if promised is not None and promised != count:
                raise RunError(
                    f"{runner.chain} made {count} rows of {name}, and {source} {promised}. Its steps must depend on their rows and "
                    "seeded random numbers alone, and map_batches(udf_modifying_row_count=False) return as many rows as it gets."
                )
        return UnitSamples(label=unit["label"], columns=columns, count=count, errors=errors)


COUNT = "count"
"""A column of a task: the samples that a unit gave before; None if that is unknown."""


def expected_rows(unit: Mapping[str, Any]) -> int | None:
    """The samples of a unit whose steps give as many rows as they get; None if its rows are unknown."""
    rows: int | None = unit["inputs"] if unit["rows"] is None else unit["rows"]
    return rows


def unit_name(label: str) -> str:
    """A unit's name in messages."""
    return f"{label} of the ray.data.Dataset"


def gathered(
    units: NDArray[Any], rows: NDArray[Any], samples_of: Callable[[int], UnitSamples], *, changed: bool
) -> Samples:
    """The samples at these rows of these units, which ``samples_of`` returns by number.

    ``changed``: a transform may change samples in place, so it gets copies: a call may be repeated, and a row drawn again.
    """
    cuts = (np.flatnonzero(np.diff(units)) + 1).tolist()
    runs = list(itertools.pairwise([0, *cuts, len(units)]))
    pieces: list[Columns] = []
    errors: dict[int, str] = {}
    for start, stop in runs:
        unit = samples_of(int(units[start]))
        pieces.append(_picked(unit.columns, rows[start:stop], changed=changed))
        for row in range(start, stop) if unit.errors else ():
            if (reason := unit.errors.get(int(rows[row]))) is not None:
                errors[row] = reason
    return Samples(joined(pieces, [stop - start for start, stop in runs]), errors)


class _Pieces:
    """The pieces of a unit. Each goes at once to its place in memory for the whole unit: joining them later would read them again.

    ``rows``: about their number. None: unknown.
    """

    def __init__(self, rows: int | None) -> None:
        self._rows, self._pieces = rows, list[Columns]()
        self._gather: Gather | None = None

    def add(self, piece: Columns) -> None:
        if self._gather is None and self._rows is not None and self._pieces:  # there are several
            self._gather = Gather(self._rows, Scratch())
            self._pieces = [self._placed(self._gather, earlier) for earlier in self._pieces]
        self._pieces.append(piece if self._gather is None else self._placed(self._gather, piece))

    def joined(self) -> Columns:
        """The columns of all pieces."""
        gather = self._gather
        if gather is None:
            return joined(self._pieces)
        rows = sum(map(_length, self._pieces))
        whole = {name: gather.whole(name, rows) for name in dict.fromkeys(name for p in self._pieces for name in p)}
        rest = {name for name, column in whole.items() if column is None}
        parts = [{name: column for name, column in piece.items() if name in rest} for piece in self._pieces]
        rest_columns = joined(parts, list(map(_length, self._pieces)))
        return {name: rest_columns[name] if column is None else column for name, column in whole.items()}

    @staticmethod
    def _placed(gather: Gather, piece: Columns) -> Columns:
        arrays: Columns = {name: column for name, column in piece.items() if isinstance(column, np.ndarray)}
        return {**piece, **gather.place(arrays)}


def _row_by_row(
    runner: Runner, unit: Mapping[str, Any], place: Mapping[str, Any], seed: int
) -> tuple[Columns, int, dict[int, str]]:
    """Run a unit row by row: (columns, number of samples, errors). A row that fails is one sample without content."""
    pieces: list[Columns] = []
    lengths: list[int] = []
    errors: dict[int, str] = {}

    def fail(error: BaseException, rows: int = 1) -> None:
        for row in range(sum(lengths), sum(lengths) + rows):
            errors[row] = f"its step raised {say_cause(error)}"
        pieces.append({})
        lengths.append(rows)

    seeds = itertools.count()
    seed_generators(mix(seed, next(seeds)))
    try:
        for outcome in runner.run_each(unit["packed_input"], **place):
            if isinstance(outcome, Exception):
                fail(outcome)
            else:
                pieces.append(outcome)
                lengths.append(_length(outcome))
            seed_generators(mix(seed, next(seeds)))
    except FAILURES as error:  # the input itself
        fail(error, max((unit["rows"] or 1) - sum(lengths), 1))
    return joined(pieces, lengths), sum(lengths), errors


def _picked(columns: Columns, rows: NDArray[np.int64], *, changed: bool) -> Columns:
    """These rows: views if they follow one another, and copies if they may be ``changed``."""
    views = bool(len(rows)) and rows[-1] - rows[0] == len(rows) - 1 and bool(np.all(np.diff(rows) == 1))
    if views:
        columns = {name: column[rows[0] : rows[-1] + 1] for name, column in columns.items()}
    else:
        columns = take(columns, rows)
    return {name: own_column(column, shared=views) for name, column in columns.items()} if changed else columns


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def joined(pieces: Sequence[Columns], lengths: Sequence[int] | None = None) -> Columns:
    """Join pieces of columns. A column that a piece lacks holds None there.

    ``lengths``: the rows of each piece, which are needed if one has no columns.
    """
    if len(pieces) == 1:
        return pieces[0]
    lengths = list(map(_length, pieces)) if lengths is None else lengths
    return {name: _column(parts) for name, parts in parts_of_columns(pieces, lengths).items()}


def _column(parts: Sequence[Column]) -> Column:
    parts = typed(parts)
    arrays = [as_array(part) for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        dtype = common_dtype(array.dtype for array in arrays)
        if dtype is not None:
            return np.concatenate(arrays, dtype=dtype)
    return listed(parts)


def say_cause(error: BaseException) -> str:
    """The user's own error inside Ray's, without the advice that Ray appends to its text."""
    while error.__cause__ is not None:
        error = error.__cause__
    rest = str(error).partition("\n")[2]
    return say(error).replace(f"\n{rest}", "", 1) if rest else say(error)
