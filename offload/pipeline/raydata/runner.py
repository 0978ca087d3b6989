"""Run the steps of a unit of a ``ray.data.Dataset`` in a preprocessing process, as Ray Data would, and make columns of the results.

Where it stops: :mod:`offload.ray_private.data.dataset_plan` decides which steps a unit has, and
:mod:`offload.ray_private.data.steps` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from ray.data.block import BlockAccessor

from offload.pipeline.blocks.wire import Columns
from offload.pipeline.raydata.columns import columns_of_block, marked, marked_objects
from offload.pipeline.raydata.table_batches import numpy_batches
from offload.ray_private.data.steps import Chain, Read, Steps, cut

__all__ = ["Chain", "Runner"]


class Runner:
    """A chain in a preprocessing process. ``constructed``: the objects of earlier chains' classes (:class:`Steps`)."""

    def __init__(self, chain: Chain, constructed: dict[int, Any] | None = None) -> None:
        self.chain = chain
        self._steps = Steps(chain, numpy_batches, constructed)

    def run(self, packed_input: bytes, *, number: int, start: int = 0, stop: int | None = None) -> Iterator[Columns]:
        """The samples of a unit, as pieces of columns. Empty pieces are left out."""
        with self._steps.task(number) as context:
            read = self._steps.read(packed_input, start, stop, context)
            yield from filter(None, self._pieces(read, context))

    def run_each(
        self, packed_input: bytes, *, number: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Columns | Exception]:
        """The samples of each row of a unit's input by itself: its columns, or the error that its steps raised.

        Raises the error of the input, if it cannot be read.
        """
        with self._steps.task(number) as context:
            read = self._steps.read(packed_input, start, stop, context)
            for block in list(read.blocks):
                for row in range(BlockAccessor.for_block(block).num_rows()):
                    single = Read(blocks=[cut(block, row, row + 1)], steps=read.steps, instances=read.instances)
                    try:
                        pieces = list(self._pieces(single, context))
                    except Exception as error:
                        yield error
                        continue
                    yield from filter(None, pieces)

    def _pieces(self, read: Read, context: Any) -> Iterator[Columns]:
        numbers: set[str] = set()
        kind, results = self._steps.apply(read, context, lambda blocks: _telling_numbers(blocks, numbers))
        if kind == "rows":
            columns = _columns_of_rows(results)
            yield {name: marked(column, of_numbers=name in numbers) for name, column in columns.items()}
        elif kind == "batches":
            yield from map(_columns_of_batch, results)
        else:
            yield from map(columns_of_block, results)


def _columns_of_rows(rows: Iterable[Mapping[str, Any]]) -> Columns:
    """The columns of rows, which need not have the same keys."""
    columns: dict[str, list[Any]] = {}
    count = 0
    for count, row in enumerate(rows, start=1):
        for name, value in row.items():
            column = columns.setdefault(name, [])
            column.extend([None] * (count - 1 - len(column)))
            column.append(value)
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return dict(columns)


def _telling_numbers(blocks: Iterable[Any], numbers: set[str]) -> Iterator[Any]:
    """Pass the blocks on, and add the names of their numeric columns to ``numbers``."""
    for block in blocks:
        if isinstance(block, pa.Table):
            numbers.update(field.name for field in block.schema if _is_of_numbers(field.type))
        yield block


def _is_of_numbers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _columns_of_batch(batch: Any) -> Columns:
    if isinstance(batch, Mapping):
        return marked_objects(batch) if any(len(column) for column in batch.values()) else {}
    return columns_of_block(BlockAccessor.batch_to_block(batch))
