"""Run the steps of a unit of a ``ray.data.Dataset`` in a preprocessing process, as Ray Data would.

Where it stops: :mod:`offload.pipeline.raydata.dataset_plan` decides which steps a unit has.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray import cloudpickle
from ray.data import DataContext
from ray.data._internal.datasource_v2.formats.parquet import parquet_file_reader
from ray.data._internal.execution.interfaces.task_context import TaskContext
from ray.data._internal.execution.operators.map_transformer import (
    BatchMapTransformFn,
    MapTransformer,
    MapTransformFnDataType,
)
from ray.data._internal.planner.plan_expression import synthetic_impl
from ray.data.block import BlockAccessor

from offload.pipeline.blocks.wire import Columns
from offload.pipeline.raydata.columns import columns_of_block, marked, marked_objects
from offload.pipeline.raydata.table_batches import numpy_batches

WINDOW_BYTES = 1 << zlib.MAX_WBITS  # zlib looks no further back


def _unpacked(packed: bytes, common: bytes) -> Any:
    unpacker = zlib.decompressobj(zdict=common)
    return cloudpickle.loads(unpacker.decompress(packed) + unpacker.flush())


_EXPRESSIONS: Any = synthetic_impl


_RANDOM = _EXPRESSIONS.eval_random


def _random_of_unit(rows: int, block_type: Any, **options: Any) -> Any:
    """The values of a ``random()`` expression. Without a fixed seed, they come from the generators, which are seeded for each unit."""
    if options.get("seed") is None or options.get("reseed_after_execution", True):
        options["seed"] = int(np.random.randint(1 << 31))
    return _RANDOM(rows, block_type, **options)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The steps that follow an input, ready to travel to a preprocessing process."""

    names: tuple[str, ...]
    transformers: tuple[MapTransformer, ...]
    context: DataContext
    common: bytes

    @classmethod
    def of(cls, operators: Sequence[Any], context: DataContext, common: bytes) -> Chain:
        """The steps of these map operators. ``common``: the dictionary with which their inputs were compressed."""
        return cls(
            common=common,
            names=tuple(op.name for op in operators),
            transformers=tuple(op.get_map_transformer() for op in operators),
            context=context,
        )

    def __str__(self) -> str:
        return " → ".join(self.names) or "stored blocks"


class Runner:
    """A chain in a preprocessing process.

    It constructs the classes of the chain's steps once. ``constructed`` holds those of earlier chains by the id of their step, since the
    chains of a union have steps in common.
    """

    def __init__(self, chain: Chain, constructed: dict[int, Any] | None = None) -> None:
        constructed = {} if constructed is None else constructed
        self.chain = chain
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised; Ray logs each retry, too
        # Ray's reader of Parquet would decode columns on 32 threads; each process here has one core.
        parquet_file_reader._READER_CPU_COUNT = 0
        _EXPRESSIONS.eval_random = _random_of_unit
        self._instances: list[Any] = []
        for transformer in chain.transformers:
            if id(transformer) not in constructed:
                # Ray keeps the objects of one step's classes in this global, one step to a process.
                ray.data._map_actor_context = None
                transformer.init()
                constructed[id(transformer)] = ray.data._map_actor_context
                if getattr(ray.data._map_actor_context, "is_async", False):
                    # The next such step gets a loop of its own. In one loop, it would wait for this one's coroutines for ever.
                    asyncio.set_event_loop(None)
            self._instances.append(constructed[id(transformer)])
        ray.data._map_actor_context = None

    def run(self, packed_input: bytes, *, number: int, start: int = 0, stop: int | None = None) -> Iterator[Columns]:
        """The samples of a unit, as pieces of columns. Empty pieces are left out."""
        context = TaskContext(task_idx=number, op_name=str(self.chain))
        with DataContext.current(self.chain.context), TaskContext.current(context):
            yield from filter(None, self._pieces(packed_input, start, stop, context))

    def run_each(
        self, packed_input: bytes, *, number: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Columns | Exception]:
        """The samples of each row of a unit's input by itself: its columns, or the error that its steps raised.

        Raises the error of the input, if it cannot be read.
        """
        context = TaskContext(task_idx=number, op_name=str(self.chain))
        with DataContext.current(self.chain.context), TaskContext.current(context):
            blocks, steps, instances = self._read(packed_input, start, stop, context)
            for block in list(blocks):
                for row in range(BlockAccessor.for_block(block).num_rows()):
                    try:
                        pieces = list(self._applied([_cut(block, row, row + 1)], steps, instances, context))
                    except Exception as error:
                        yield error
                        continue
                    yield from filter(None, pieces)

    def _pieces(self, packed_input: bytes, start: int, stop: int | None, context: TaskContext) -> Iterator[Columns]:
        blocks, steps, instances = self._read(packed_input, start, stop, context)
        yield from self._applied(blocks, steps, instances, context)

    def _read(
        self, packed_input: bytes, start: int, stop: int | None, context: TaskContext
    ) -> tuple[Iterable[Any], Sequence[MapTransformer], Sequence[Any]]:
        """(the blocks of a unit's input, the steps that follow, and the objects of their classes)"""
        unpacked = _unpacked(packed_input, self.chain.common)
        if isinstance(unpacked, ray.ObjectRef):
            return [_cut(ray.get(unpacked), start, stop)], self.chain.transformers, self._instances
        reading, *steps = self.chain.transformers
        blocks: Iterable[Any] = [unpacked]
        for function in reading.get_transform_fns():
            blocks = function(blocks, context)
        return _rows_between(blocks, start, stop), steps, self._instances[1:]

    def _applied(
        self,
        blocks: Iterable[Any],
        transformers: Sequence[MapTransformer],
        instances: Sequence[Any],
        context: TaskContext,
    ) -> Iterator[Columns]:
        """The output of the last function, taken before Ray builds blocks of it, which costs a copy or two."""
        functions = [
            (function, instance)
            for transformer, instance in zip(transformers, instances, strict=True)
            for function in transformer.get_transform_fns()
        ]
        if not functions:
            yield from map(columns_of_block, blocks)
            return
        for function, instance in functions[:-1]:
            blocks = _with_instance(function(blocks, context), instance)
        last, instance = functions[-1]
        numbers: set[str] = set()
        if last._input_type is MapTransformFnDataType.Row:
            blocks = _telling_numbers(blocks, numbers)
        results = _with_instance(last._apply_transform(context, _preprocessed(last, blocks)), instance)
        if last._input_type is MapTransformFnDataType.Row:
            columns = _columns_of_rows(results)
            yield {name: marked(column, of_numbers=name in numbers) for name, column in columns.items()}
        elif last._input_type is MapTransformFnDataType.Batch:
            yield from map(_columns_of_batch, results)
        else:
            yield from map(columns_of_block, results)


def _preprocessed(function: Any, blocks: Iterable[Any]) -> Iterable[Any]:
    """The arguments of a function for these blocks: rows, batches, or the blocks."""
    in_arrays = isinstance(function, BatchMapTransformFn) and function._batch_format == "numpy"
    if in_arrays and isinstance(function._batch_size, int) and function._zero_copy_batch:
        return numpy_batches(blocks, function._batch_size, function._pre_process)
    arguments: Iterable[Any] = function._pre_process(blocks)
    return arguments


def _with_instance(results: Iterable[Any], instance: Any) -> Iterator[Any]:
    """The results of a step, made while Ray's global holds that step's own objects.

    Steps run interleaved, each asking the one before it, so the global is set for each result.
    """
    if getattr(instance, "is_async", False):
        results = _at_once(results)  # its coroutines look for the object whenever they begin, on a thread of their own
    results = iter(results)
    while True:
        before = ray.data._map_actor_context
        ray.data._map_actor_context = instance
        try:
            result = next(results)
        except StopIteration:
            return
        finally:
            ray.data._map_actor_context = before
        yield result


def _at_once(results: Iterable[Any]) -> Iterator[Any]:
    """These results, all made before the first one is returned."""
    yield from list(results)


def _cut(block: Any, start: int, stop: int | None) -> Any:
    if stop is None:
        return block
    # Convert to Arrow: slicing rows of pandas warns with some versions of pandas.
    return BlockAccessor.for_block(BlockAccessor.for_block(block).to_arrow()).slice(start, stop, copy=False)


def _rows_between(blocks: Iterable[Any], start: int, stop: int | None) -> Iterator[Any]:
    """The rows [start, stop) of a sequence of blocks."""
    at = 0
    for block in blocks:
        rows = BlockAccessor.for_block(block).num_rows()
        first, last = max(start - at, 0), rows if stop is None else min(stop - at, rows)
        at += rows
        if (first, last) == (0, rows):
            yield block
        elif first < last:
            yield _cut(block, first, last)
        if stop is not None and at >= stop:
            return


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
