"""Batches of the rows of Arrow tables as NumPy arrays, cut as Ray Data cuts them.

For each batch, Ray Data slices a table, builds another one, and converts its columns, which costs more than a light function. Here, columns
of numbers become arrays once for each chunk of a table, and batches are views of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

Batch = dict[str, np.ndarray[Any, Any]]


def numpy_batches(
    tables: Iterable[Any], size: int, otherwise: Callable[[Iterable[Any]], Iterable[Any]]
) -> Iterator[Any]:
    """Batches of ``size`` rows of these tables. The last one may be smaller. Arrays of numbers are read-only.

    ``otherwise`` makes the batches from the first unusual block on, such as one of tensors or of pandas.
    """
    tables = iter(tables)
    held: list[pa.RecordBatch] = []  # rows that do not fill a batch yet
    for table in tables:
        if not _is_usual(table) or (held and held[0].schema != table.schema):
            before = [pa.Table.from_batches(held)] if held else []
            yield from otherwise(itertools.chain(before, [table], tables))
            return
        for chunk in table.to_batches():
            first = 0
            if held:
                first = min(size - sum(map(len, held)), len(chunk))
                held.append(chunk.slice(0, first))
                if sum(map(len, held)) < size:
                    continue
                yield _joined(held)
                held = []
            # Whole batches within one chunk are views. Only those across two chunks need a copy.
            last = len(chunk) - (len(chunk) - first) % size
            yield from _whole_batches(chunk, first, last, size)
            if last < len(chunk):
                held = [chunk.slice(last)]
    if held:
        yield _joined(held)


def _is_usual(table: Any) -> bool:
    """Return whether NumPy's arrays of a table's columns are what Arrow makes of them."""
    if not isinstance(table, pa.Table) or not 0 < table.num_columns == len(set(table.column_names)):
        return False
    return not any(isinstance(kind, pa.BaseExtensionType) or pa.types.is_null(kind) for kind in table.schema.types)


def _whole_batches(chunk: pa.RecordBatch, first: int, last: int, size: int) -> Iterator[Batch]:
    """Cut the rows from ``first`` to ``last`` of a chunk, a multiple of ``size``, into batches."""
    if first == last:
        return
    numbers = {name: column.to_numpy() for name, column in _columns(chunk) if _is_of_numbers(column)}
    for start in range(first, last, size):
        yield {
            name: numbers[name][start : start + size] if name in numbers else _as_array(column.slice(start, size))
            for name, column in _columns(chunk)
        }


def _joined(chunks: list[pa.RecordBatch]) -> Batch:
    table = pa.Table.from_batches(chunks).combine_chunks()
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def _columns(chunk: pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
    return zip(chunk.schema.names, chunk.columns, strict=True)


def _is_of_numbers(column: pa.Array) -> bool:
    """Return whether the column's memory is that of an array."""
    numeric = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    return bool(numeric) and column.null_count == 0


def _as_array(column: pa.Array) -> np.ndarray[Any, Any]:
    # Convert batch by batch, as Ray does: integers become floats only in batches where some are missing.
    return np.asarray(pa.chunked_array([column]).to_numpy(zero_copy_only=False))
