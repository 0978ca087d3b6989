"""Whole samples of any structure on their way to a worker.

A column holds one kind of value, and its rows have one shape. Token sequences, boxes, dicts or objects have no such column. These
samples travel as they are: a row of a block holds all samples that one input gave (one; none if a filter dropped it; several if a
transform yielded several). Their pickled structure and the contents of their arrays lie in two columns.

Where it stops: which samples form a batch, and how they are collated, is the worker's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import RunError
from offload.pipeline.blocks.wire import Array, Columns, ContentsType, UnsendableError, first_line

SAMPLES = "__samples__"
"""A column whose rows are lists of samples. In a block, it holds their pickles."""

CONTENTS = "__contents__"
"""A block's column of the contents of the samples' arrays and tensors, as bytes."""

LENGTHS = "__lengths__"
_ALIGNED = 64
_BESIDE_BYTES = 1 << 10  # smaller contents stay in the pickle


def rows_of(columns: Mapping[str, Any], rows: int) -> list[list[Any]]:
    """The samples of each row: those of the column :data:`SAMPLES`, or one dict of the columns' values."""
    if SAMPLES in columns:
        return list(columns[SAMPLES])
    # Iterate instead of indexing: a pandas column is indexed by labels, not by places.
    values: Iterable[tuple[Any, ...]] = zip(*columns.values(), strict=True) if columns else itertools.repeat((), rows)
    return [[dict(zip(columns, row, strict=True))] for row in values]


def is_nested(column: Any) -> bool:
    """Return whether the rows of a column are dicts, lists or tuples that hold arrays, judged by the first row that holds anything."""
    if isinstance(column, np.ndarray) or not isinstance(column, Sequence):
        return False
    first = next((row for row in column if not _is_empty(row)), None)
    return isinstance(first, Mapping | list | tuple) and _holds_array(first)


def _is_empty(value: Any) -> bool:
    """Return whether a value holds nothing: None, an array without elements, or a structure of nothing else.

    Examples are the crops of an image without objects, and an empty list in a Parquet file.
    """
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, np.ndarray):
        return not value.size
    return value is None or (isinstance(value, list | tuple) and all(map(_is_empty, value)))


def _holds_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_array, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_array, value))
    return (hasattr(value, "shape") and not isinstance(value, np.generic)) or type(value).__module__.startswith("PIL.")


def encode(rows: Sequence[Sequence[Any]]) -> dict[str, pa.Array]:
    """The columns of a block that hold these rows of samples. Raises UnsendableError for a sample that cannot be pickled."""
    from offload.pipeline.blocks.packing import pack  # imports torch, whose start costs seconds

    structures: list[bytes] = []
    lengths: list[list[int]] = []
    parts: list[Array] = []
    ends = np.zeros(len(rows) + 1, np.int64)
    padding = np.zeros(_ALIGNED, np.uint8)
    for number, samples in enumerate(rows):
        try:
            packed = pack(list(samples), beside_bytes=_BESIDE_BYTES)
        except Exception as error:  # a user's class may raise anything
            raise UnsendableError(
                f"a sample that cannot be pickled ({first_line(error)})",
                "return numbers, arrays, tensors, text, bytes, or lists and dicts of these",
                SAMPLES,
                number,
            ) from None
        structures.append(packed.structure)
        lengths.append([content.nbytes for content in packed.contents])
        size = 0
        for content in packed.contents:
            rest = -content.nbytes % _ALIGNED
            parts += [content, padding[:rest]]
            size += content.nbytes + rest
        ends[number + 1] = ends[number] + size
    content = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(content)]
    stored = pa.Array.from_buffers(pa.large_binary(), len(rows), buffers)
    return {
        SAMPLES: pa.array(structures, pa.large_binary()),
        LENGTHS: pa.array(lengths, pa.list_(pa.int64())),
        CONTENTS: pa.ExtensionArray.from_storage(ContentsType(), stored),
    }


def decode(columns: Columns) -> list[list[Any]]:
    """The rows of samples in a block's decoded columns, from which this removes the columns of :func:`encode`.

    Large arrays are views of the block's memory. Raises RunError for samples that cannot be loaded here.
    """
    from offload.pipeline.blocks.packing import Packed, unpack

    rows = []
    structures, lengths, contents = columns.pop(SAMPLES), columns.pop(LENGTHS), columns.pop(CONTENTS)
    for structure, sizes, content in zip(structures, lengths, contents, strict=True):
        at, parts = 0, []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size + -size % _ALIGNED
        try:
            rows.append(unpack(Packed(structure, tuple(parts))))
        except Exception as error:
            raise RunError(
                f"a sample cannot be loaded in a worker: {first_line(error)}. Its class must be importable there, or return "
                "tensors, numbers, text, lists and dicts."
            ) from None
    return rows
