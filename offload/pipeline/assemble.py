"""The block of a task: the chunks that it has made, joined, with what may travel to a worker and what may not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import RunError
from offload.pipeline import whole_samples, wire
from offload.pipeline.chunks import TRAINED, untrained
from offload.pipeline.gather import Gather
from offload.pipeline.wire import ERROR, POSITION, SAMPLE_ID, Column, Columns, RaggedError, UnsendableError, take
from offload.pipeline.wording import Words


@dataclass(frozen=True)
class Processed:
    """A task's results.

    Args:
        rows: its index rows.
        parts: the columns of each chunk.
        kept: the numbers of the rows of each chunk.
        skipped: the errors of skipped rows.
    """

    rows: pa.Table
    parts: list[Columns]
    kept: list[np.ndarray[Any, Any]]
    skipped: dict[int, str]


def assemble(made: Processed, gather: Gather, words: Words, *, whole: bool, skip: bool) -> pa.Table:
    """Join all chunks in one block, of ``whole`` samples or of columns. With ``skip``, a column holds the errors of rows.

    Skipped rows stay, as copies of row 0 that carry their error: a task returns as many rows as it got, so no row is lost silently.

    Raises RunError for samples that cannot travel, or differ in shape.
    """
    if whole or any(whole_samples.is_nested(column) for part in made.parts for column in part.values()):
        return _assemble_whole(made, words, skip=skip)
    rows, parts, kept, skipped = made.rows, made.parts, made.kept, made.skipped
    order = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    columns: Columns = {}
    for name, values in wire.parts_of_columns(parts, list(map(len, kept))).items():
        if (gathered := gather.whole(name, len(order))) is not None:
            columns[name] = gathered
            continue
        columns[name] = _stacked(name, values, rows, order, words)
    if skipped:
        missing = np.array(sorted(skipped), dtype=np.int64)
        back = np.argsort(np.concatenate((order, missing)), kind="stable")
        fill = np.where(back < len(order), back, 0)
        columns = take(columns, fill) if len(order) else {}
    if skip:
        columns[ERROR] = [skipped.get(i) for i in range(rows.num_rows)]
    columns[SAMPLE_ID] = rows.column(SAMPLE_ID).to_numpy()
    columns[POSITION] = rows.column(POSITION).to_numpy()
    sent = untrained(rows) if TRAINED in rows.column_names else None
    try:
        return wire.encode(columns if sent is None else take(columns, sent))
    except UnsendableError as error:
        row = error.row if sent is None else int(sent[error.row])
        raise unsendable(error, words.sample(rows, row), words) from None


def _assemble_whole(made: Processed, words: Words, *, skip: bool) -> pa.Table:
    """Join all chunks in one block of whole samples. Skipped rows hold no sample, and their error."""
    rows = made.rows
    samples: list[list[Any]] = [[] for _ in range(rows.num_rows)]
    for part, numbers in zip(made.parts, made.kept, strict=True):
        for number, row in zip(numbers.tolist(), whole_samples.rows_of(part, len(numbers)), strict=True):
            samples[number] = row
    sent = untrained(rows)
    columns: Columns = {SAMPLE_ID: rows.column(SAMPLE_ID).to_numpy(), POSITION: rows.column(POSITION).to_numpy()}
    if skip:
        columns[ERROR] = [made.skipped.get(i) for i in range(rows.num_rows)]
    block = wire.encode(take(columns, sent))
    try:
        for name, column in whole_samples.encode([samples[i] for i in sent.tolist()]).items():
            block = block.append_column(name, column)
    except UnsendableError as error:
        raise unsendable_sample(error, words.sample(rows, int(sent[error.row])), words) from None
    return block


def unsendable_sample(error: UnsendableError, sample: str, words: Words) -> RunError:
    return RunError(f"{sample}{words.made_by(', ')} is {error.what}: {error.instead}.")


def _stacked(name: str, parts: list[Column], rows: pa.Table, order: np.ndarray[Any, Any], words: Words) -> Column:
    try:
        parts = list(wire.typed([plain(name, part) for part in parts]))
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) < len(parts):
            return wire.stack(name, wire.listed(parts))
    except RaggedError as error:
        raise _ragged(name, error.shapes, [int(order[i]) for i in error.rows], rows, words) from None
    except UnsendableError as error:
        raise unsendable(error, words.sample(rows, int(order[error.row])), words) from None
    first = 0
    for array in arrays:
        if array.shape[1:] != arrays[0].shape[1:]:
            shapes = (arrays[0].shape[1:], array.shape[1:])
            raise _ragged(name, shapes, [int(order[0]), int(order[first])], rows, words)
        first += len(array)
    return wire.join(parts)


def plain(name: str, column: Any) -> Column:
    """The user's column as an array of numbers or a list of rows."""
    if not hasattr(column, "dtype"):
        return list(column)
    try:
        array = wire.as_array(column)
    except UnsendableError as error:
        raise UnsendableError(error.what, error.instead, name) from None
    return list(array) if array.dtype.hasobject else array


def unsendable(error: UnsendableError, sample: str, words: Words) -> RunError:
    return RunError(
        f"column {error.column!r} of {sample}{words.made_by(', ')} holds {error.what}, which cannot be sent to a worker: "
        f"{error.instead}."
    )


def _ragged(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], at: list[int], rows: pa.Table, words: Words
) -> RunError:
    who = [words.sample(rows, i) for i in at]
    return RunError(
        f"column {name!r} has rows of different shapes: {shapes[0]} for {who[0]}, {shapes[1]} for {who[1]}. "
        f"{wire.REMEDY_RAGGED}"
    )
