"""One core's task, which turns index rows into a block.

The task reads the samples, transforms them with reproducible random numbers, and packs them. A row that cannot be read ends the run or
becomes an error that the block carries, as the user chose. Where it stops: :mod:`offload.pipeline.preprocessing.transform` calls the user's
transform.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import FAILURES, RunError
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID, Columns, take
from offload.pipeline.index.mixed import in_parts
from offload.pipeline.index.rows import Picked, as_table
from offload.pipeline.index.source import Samples, nowhere
from offload.pipeline.order.chunks import CHUNK
from offload.pipeline.order.shuffling import mix
from offload.pipeline.preprocessing.block import Gather, Processed, Scratch, assemble
from offload.pipeline.preprocessing.environment import hold_to_one_core
from offload.pipeline.preprocessing.randomness import Drawn, loaded_libraries, seed_generators
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.transform import (
    _BrokenRow,
    _check_annotated,
    _find_row,
    _nbytes,
    _seeded,
    _too_long,
    check_block_names,
    transform,
)
from offload.pipeline.preprocessing.watchdog import NoReports, SampleTimeoutError, Watch
from offload.pipeline.preprocessing.wording import say
from offload.pipeline.program.remedies import image_remedy, remedy


@dataclass(frozen=True, kw_only=True)
class IndexRecipe(Recipe):
    """A recipe for the rows of an index, as a preprocessing process runs it."""

    def process(self, rows: pa.Table | Picked, *, epoch: int, scratch: Scratch, watch: Watch) -> pa.Table:
        """See :func:`process`."""
        return process(self, rows, epoch=epoch, scratch=scratch, watch=watch)


def process(
    recipe: Recipe, rows: pa.Table | Picked, *, epoch: int, scratch: Scratch | None = None, watch: Watch | None = None
) -> pa.Table:
    """Return the block of these index rows, which hold ``sample_id``, ``__position__`` and the reader's own columns.

    The block omits rows marked as :data:`TRAINED`. With ``scratch``, the block lies in that memory until the next block. The process
    tells ``watch`` what it is doing. The bytes of a sample depend on the recipe's seed, the epoch and the sample, as long as chunks
    are whole.

    Raises RunError, with the name of the sample, if a sample cannot be read or takes too long under ``on_error="raise"``, or if a
    transform raises, takes too long, returns another number of rows, or returns rows that differ in shape.
    """
    if recipe.reader is None:
        raise ValueError("process needs a recipe with a reader")
    watch, table, scratch = watch or Watch(NoReports()), as_table(rows), scratch or Scratch()
    results = _processed(recipe, table, epoch, scratch, watch)
    if results is None:  # rows without seeds have drawn random numbers; all have seeds from now on
        results = _processed(recipe, table, epoch, scratch, watch)
    assert results is not None
    watch.idle()
    return assemble(*results, recipe.words, whole=recipe.whole, skip=recipe.on_error == "skip")


def _processed(
    recipe: Recipe, rows: pa.Table, epoch: int, scratch: Scratch, watch: Watch
) -> tuple[Processed, Gather] | None:
    """Return the results of a task, and what gathered them. None: the recipe has drawn random numbers for rows that had no seeds, and the
    task must begin again."""
    reader, calls = recipe.reader, recipe.calls
    assert reader is not None
    positions = rows.column(POSITION).to_numpy()
    parts: list[Columns] = []
    kept: list[np.ndarray[Any, Any]] = []
    skipped: dict[int, str] = {}
    gather = Gather(rows.num_rows, scratch)
    reader.begin_pass(recipe.seed, epoch)
    reader.begin(rows, epoch)
    # Where a chunk ends. Calls may span several chunks, but never end within one.
    ends = np.append(np.flatnonzero(np.diff(positions // CHUNK)) + 1, len(positions))
    start = 0
    # Since the first rows without seeds. The task looks once, at its end: a look costs as much as transforming hundreds of light rows.
    drawn: Drawn | None = None
    while start < len(positions):
        stop = calls.stop(ends, start)
        chunk = rows.slice(start, stop - start)
        libraries, began = loaded_libraries(), time.perf_counter()
        calls.begin()
        if calls.seeded:
            if drawn:
                break
            drawn = None
        elif drawn is None:
            drawn = Drawn(recipe.held)
        good, columns, errors = _process_rows(recipe, chunk, epoch, watch)
        if loaded_libraries() != libraries:
            # These rows themselves imported the library of their random numbers, which was therefore not seeded.
            hold_to_one_core()
            calls.restart()
            continue
        if not calls.done(time.perf_counter() - began):
            continue
        for i, reason in errors.items():
            skipped[start + i] = f"{reader.describe(chunk, i)}: {reason}"
        if len(good):
            check_block_names(recipe, columns)
            parts.append(columns if recipe.whole else gather.place(columns))
            kept.append(good + start)
        start = stop
    if drawn:
        calls.fix()
        return None
    return Processed(rows, parts, kept, skipped), gather


def _process_rows(
    recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch
) -> tuple[np.ndarray[Any, Any], Columns, Mapping[int, str]]:
    """Return (the rows that could be read, their transformed columns, the errors of the other rows)."""
    if recipe.parts:
        return in_parts(
            recipe.parts, chunk, lambda part, rows: _process_rows(part, rows, epoch, watch), recipe.part_names
        )
    samples = _read(recipe, chunk, epoch, watch)
    while True:
        try:
            return _transform_good(recipe, chunk, samples, epoch, watch)
        except _BrokenRow as error:
            # The source left the image to the transform. The row fails as if its reader had decoded it; the others run again.
            samples.errors[error.row] = error.reason
            _check_read(recipe, chunk, samples)


def _transform_good(
    recipe: Recipe, chunk: pa.Table, samples: Samples, epoch: int, watch: Watch
) -> tuple[np.ndarray[Any, Any], Columns, Mapping[int, str]]:
    """Transform the rows that could be read. Raises _BrokenRow."""
    good = np.arange(chunk.num_rows)
    if samples.errors:
        good = np.delete(good, list(samples.errors))
    if not len(good):
        return good, {}, samples.errors
    columns = samples.columns if len(good) == chunk.num_rows else take(samples.columns, good)
    chunk = chunk if len(good) == chunk.num_rows else chunk.take(pa.array(good))
    try:
        transformed = transform(
            recipe, columns, ids=chunk.column(SAMPLE_ID).to_numpy(), chunk=chunk, epoch=epoch, watch=watch
        )
    except _BrokenRow as error:
        raise _BrokenRow(int(good[error.row]), error.reason) from None
    # From these sizes follows how many rows the next call gets.
    recipe.calls.nbytes += _nbytes(columns) + _nbytes(transformed)
    return good, transformed, samples.errors


def _read(recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch) -> Samples:
    samples = _attempt_read(recipe, chunk, epoch, watch)
    _check_read(recipe, chunk, samples)
    for name, kind in samples.annotated.items():
        _check_annotated(recipe, name, kind)
    return samples


def _check_read(recipe: Recipe, chunk: pa.Table, samples: Samples) -> None:
    """Raise RunError for a row that cannot be read, unless the user wants to skip it."""
    if samples.errors and recipe.on_error == "raise":
        row = min(samples.errors)
        reason = samples.errors[row]
        advice = _REMEDY_STORAGE if any(code in reason for code in _OF_STORAGE) else _REMEDY_SKIP
        set_up = image_remedy() if "image" in reason else ""
        raise RunError(f"{recipe.words.sample(chunk, row)} is unusable: {reason}. {advice}{set_up}")


class _CurrentRow:
    """The reader's callback, which tells the watch the current row of a chunk."""

    def __init__(self, recipe: Recipe, chunk: pa.Table, watch: Watch) -> None:
        self.row: int | None = None
        self._recipe, self._chunk, self._watch = recipe, chunk, watch
        deadline_s = recipe.sample_timeout_s
        # Until the reader names a row, only a deadline for the whole chunk makes sense.
        whole_s = None if deadline_s is None else deadline_s * chunk.num_rows
        watch.doing(lambda: f"reading {recipe.words.sample(chunk, None)}{recipe.words.of}", whole_s)

    def __call__(self, row: int) -> None:
        self.row = row
        recipe, chunk = self._recipe, self._chunk
        self._watch.doing(
            lambda: f"reading {recipe.words.sample(chunk, row)}{recipe.words.of}", recipe.sample_timeout_s
        )


def _attempt_read(recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch) -> Samples:
    reader = recipe.reader
    assert reader is not None
    at = _CurrentRow(recipe, chunk, watch)
    try:
        # A reader may be random too: a torch data set augments in __getitem__.
        with _seeded(recipe, epoch, chunk.column(recipe.seeded_by)[0].as_py(), 1):
            return reader.read(chunk, at)
    except RunError:
        raise
    except SampleTimeoutError:
        if recipe.sample_timeout_s is None:  # the deadline is that of a recipe around this one
            raise
        if recipe.on_error == "skip":
            known = {} if at.row is None else {at.row: _too_long(recipe)}
            return _read_one_by_one(recipe, chunk, epoch, watch, known)
        raise RunError(f"reading {recipe.words.sample(chunk, at.row)} {_too_long(recipe)}. {_REMEDY_SKIP}") from None
    except FAILURES as error:
        if recipe.on_error == "skip":
            # Perhaps no row fails any more: storage recovers, and augmentation draws other numbers.
            return _read_one_by_one(recipe, chunk, epoch, watch, {})
        # Read again one by one, only to name the culprit.
        row = _find_row(lambda i: reader.read(chunk.slice(i, 1), nowhere), chunk.num_rows)
        raise RunError(
            f"reading {recipe.words.sample(chunk, row)} raised {say(error)}.{remedy(error)} {_REMEDY_SKIP}"
        ) from None


_OF_STORAGE = tuple(
    f"AWS Error {code}" for code in ("ACCESS_DENIED", "SLOW_DOWN", "NETWORK_CONNECTION", "SERVICE_UNAVAILABLE")
)


_REMEDY_STORAGE = (
    "Check the storage, not the file: the credentials, their permission to read, and the limit of requests. The same command resumes from "
    "the last checkpoint."
)


_REMEDY_SKIP = 'Repair or remove it, or pass on_error="skip" to count it, list it in the run directory and go on.'


def _read_one_by_one(recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch, known: Mapping[int, str]) -> Samples:
    """Read a chunk in which some rows raise or take too long; these rows become errors, like the ``known`` ones."""
    reader = recipe.reader
    assert reader is not None
    merged: dict[str, list[Any]] = {}
    errors: dict[int, str] = dict(known)
    recipe.calls.drew = True  # each row has a seed of its own here, which only chunks repeat
    numbers = chunk.column(recipe.seeded_by).to_pylist()
    at = _CurrentRow(recipe, chunk, watch)
    for i in range(chunk.num_rows):
        values: dict[str, Any] = {}
        if i not in known:
            seed_generators(mix(recipe.seed, epoch, numbers[i], 1), recipe.held)
            at(i)
            try:
                one = reader.read(chunk.slice(i, 1), nowhere)
                if one.errors:
                    errors[i] = next(iter(one.errors.values()))
                values = {name: column[0] for name, column in one.columns.items()}
            except SampleTimeoutError:
                errors[i] = _too_long(recipe)
            except FAILURES as error:
                errors[i] = say(error)
        for name in values:
            merged.setdefault(name, [None] * i)
        for name, column in merged.items():
            column.append(values.get(name))
    return Samples(dict(merged), errors)
