"""The steps of a unit of a ``ray.data.Dataset``, as Ray Data runs them in its own processes.

Where it stops: it returns rows, batches and blocks as the functions made them. :mod:`offload.pipeline.raydata.runner` makes columns of
them.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
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

Kind = Literal["rows", "batches", "blocks"]
Batching = Callable[[Iterable[Any], int, Callable[[Iterable[Any]], Iterable[Any]]], Iterable[Any]]
"""A faster way to cut blocks into batches of arrays: (the blocks, the rows of a batch, Ray's own way)."""

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


@dataclass(frozen=True, kw_only=True)
class Read:
    """A unit's input: its blocks, the steps that follow, and the objects of their classes."""

    blocks: Iterable[Any]
    steps: Sequence[MapTransformer]
    instances: Sequence[Any]


class Steps:
    """A chain in a preprocessing process.

    It constructs the classes of the chain's steps once. ``constructed`` holds those of earlier chains by the id of their step, since the
    chains of a union have steps in common. ``batching`` may cut batches of arrays.
    """

    def __init__(self, chain: Chain, batching: Batching, constructed: dict[int, Any] | None = None) -> None:
        constructed = {} if constructed is None else constructed
        self.chain, self._batching = chain, batching
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

    @contextmanager
    def task(self, number: int) -> Iterator[TaskContext]:
        """A context in which the steps run for the unit of this number, as in a task of Ray Data."""
        context = TaskContext(task_idx=number, op_name=str(self.chain))
        with DataContext.current(self.chain.context), TaskContext.current(context):
            yield context

    def read(self, packed_input: bytes, start: int, stop: int | None, context: TaskContext) -> Read:
        """Read the rows [start, stop) of a unit's input."""
        unpacked = _unpacked(packed_input, self.chain.common)
        if isinstance(unpacked, ray.ObjectRef):
            blocks: Iterable[Any] = [cut(ray.get(unpacked), start, stop)]
            return Read(blocks=blocks, steps=self.chain.transformers, instances=self._instances)
        reading, *steps = self.chain.transformers
        blocks = [unpacked]
        for function in reading.get_transform_fns():
            blocks = function(blocks, context)
        return Read(blocks=_rows_between(blocks, start, stop), steps=steps, instances=self._instances[1:])

    def apply(
        self, read: Read, context: TaskContext, seen: Callable[[Iterable[Any]], Iterable[Any]]
    ) -> tuple[Kind, Iterable[Any]]:
        """The results of the last function, taken before Ray builds blocks of them, which costs a copy or two. ``seen`` passes on the
        blocks of a last function that takes rows."""
        blocks = read.blocks
        functions = [
            (function, instance)
            for transformer, instance in zip(read.steps, read.instances, strict=True)
            for function in transformer.get_transform_fns()
        ]
        if not functions:
            return "blocks", blocks
        for function, instance in functions[:-1]:
            blocks = _with_instance(function(blocks, context), instance)
        last, instance = functions[-1]
        by_rows = last._input_type is MapTransformFnDataType.Row
        arguments = self._arguments(last, seen(blocks) if by_rows else blocks)
        results = _with_instance(last._apply_transform(context, arguments), instance)
        if by_rows:
            return "rows", results
        return "batches" if last._input_type is MapTransformFnDataType.Batch else "blocks", results

    def _arguments(self, function: Any, blocks: Iterable[Any]) -> Iterable[Any]:
        """The arguments of a function for these blocks: rows, batches, or the blocks."""
        in_arrays = isinstance(function, BatchMapTransformFn) and function._batch_format == "numpy"
        if in_arrays and isinstance(function._batch_size, int) and function._zero_copy_batch:
            return self._batching(blocks, function._batch_size, function._pre_process)
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


def cut(block: Any, start: int, stop: int | None) -> Any:
    """The rows [start, stop) of a block."""
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
            yield cut(block, first, last)
        if stop is not None and at >= stop:
            return
