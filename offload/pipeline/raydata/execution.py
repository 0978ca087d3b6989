"""``ray.data.Dataset`` sources that Ray Data executes: the user's own pipeline, then the transform and the wire format.

Where it stops: :mod:`offload.ray_private.data.blocks` knows the blocks of an execution.
"""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from ray import cloudpickle
from ray.data import DataContext

from offload.errors import RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.values import own_column
from offload.pipeline.blocks.whole_samples import CONTENTS, SAMPLES
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Columns, RaggedError, UnsendableError, take
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import mix
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.pool.task import Block, Cost
from offload.pipeline.preprocessing.block import plain, unsendable, unsendable_sample
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.transform import check_names, transform
from offload.pipeline.raydata.columns import columns_of_block
from offload.pipeline.raydata.units import user_ids
from offload.ray_private.data.blocks import blocks_of


def encode_foreign(
    recipe: Recipe, columns: Columns, *, id_column: str | None, done: Ranges, epoch: int = 0
) -> pa.Table:
    """Return the block of a batch of a plain ``ray.data.Dataset``, without the samples whose ids are in ``done``.

    Without an ``id_column``, the reading side numbers the samples. The transform processes a partly trained batch as a whole, as before: a
    part of it would draw other random numbers. If Ray Data forms other batches, the random numbers of a per-batch transform still change.

    Raises RunError for samples that cannot travel in a block.
    """
    ids = np.arange(len(next(iter(columns.values()), ())), dtype=np.int64)
    seeded, fresh = recipe, np.arange(len(ids))
    if id_column is not None:
        ids = user_ids(columns, id_column) if len(ids) else ids
        fresh = np.flatnonzero(~done.holds(ids))
        if not len(fresh) or recipe.kind != "batch":
            columns, ids = take(columns, fresh), ids[fresh]
            fresh = np.arange(len(ids))
    elif len(ids) and recipe.kind != "none":
        # Rows are numbered within their block, so only the content tells blocks apart: it seeds their random numbers.
        first: bytes = cloudpickle.dumps({name: column[0] for name, column in columns.items()})  # type: ignore[no-untyped-call]
        seeded = dataclasses.replace(recipe, seed=mix(recipe.seed, zlib.crc32(first)))
    encoded: Columns = {}
    if len(ids):
        if recipe.kind != "none":  # the transform may write to its samples, and Ray's arrays are read-only
            columns = {name: own_column(column) for name, column in columns.items()}
        results = transform(seeded, columns, ids=ids, chunk=None, epoch=epoch)
        reserved = [POSITION, ERROR, CONTENTS, *([SAMPLE_ID] if id_column not in (None, SAMPLE_ID) else [])]
        check_names(recipe, results, reserved if recipe.whole else [*reserved, SAMPLES])
        if recipe.whole or any(map(whole_samples.is_nested, results.values())):
            return _encode_foreign_whole(recipe, results, ids, fresh, numbered=id_column is not None)
        for name, column in results.items():
            try:
                plain_column = plain(name, column)
                encoded[name] = plain_column if isinstance(plain_column, np.ndarray) else wire.stack(name, plain_column)
            except RaggedError as error:
                raise RunError(
                    f"column {name!r} has rows of different shapes: {error.shapes[0]} for sample {ids[error.rows[0]]}, "
                    f"{error.shapes[1]} for sample {ids[error.rows[1]]}. {wire.REMEDY_RAGGED}"
                ) from None
            except UnsendableError as error:
                raise unsendable(error, recipe.words.sample(None, error.row, ids), recipe.words) from None
    if id_column is not None:
        encoded[SAMPLE_ID] = encoded[POSITION] = ids
    try:
        return wire.encode(encoded if len(fresh) == len(ids) else take(encoded, fresh))
    except UnsendableError as error:
        raise unsendable(error, recipe.words.sample(None, int(fresh[error.row]), ids), recipe.words) from None


def _encode_foreign_whole(
    recipe: Recipe, results: Columns, ids: np.ndarray[Any, Any], fresh: np.ndarray[Any, Any], *, numbered: bool
) -> pa.Table:
    rows = whole_samples.rows_of(results, len(ids))
    block = wire.encode({SAMPLE_ID: ids[fresh], POSITION: ids[fresh]} if numbered else {})
    try:
        encoded = whole_samples.encode([rows[i] for i in fresh.tolist()])
    except UnsendableError as error:
        raise unsendable_sample(error, recipe.words.sample(None, int(fresh[error.row]), ids), recipe.words) from None
    return pa.table({**{name: block.column(name) for name in block.column_names}, **encoded})


def be_quiet() -> None:
    """Keep Ray Data's progress bars and warnings out of the run's output. Failures still raise errors."""
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def encode_dataset(
    dataset: ray.data.Dataset,
    packed: PackedRecipe,
    *,
    id_column: str | None,
    done: Ranges,
    epoch: int,
    task_cpus: float,
    store_bytes: float,
) -> Iterator[Block]:
    """Execute a user's dataset followed by its transform, and yield its blocks in the wire format.

    Dropping the iterator ends the execution. ``store_bytes`` limits its share of the object store, unless the user set less.
    """
    # A dataset executes with the context of its creation, not with that of this process.
    dataset.context.enable_progress_bars = False
    dataset.context.raise_original_map_exception = True  # Ray's own error only says that a function failed
    options = dataset.context.execution_options
    limits = options.resource_limits
    # The rest of the object store holds blocks that wait for workers.
    options.resource_limits = limits.copy(object_store_memory=min(limits.object_store_memory, store_bytes))
    encoded = dataset.map_batches(
        _encode,  # type: ignore[arg-type]  # a block is Arrow's or pandas'
        batch_size=None,
        batch_format=None,  # the blocks, as they are
        fn_kwargs={"packed": packed, "id_column": id_column, "done": done, "epoch": epoch},
        num_cpus=task_cpus,
    )
    return iterate(encoded)


def _encode(block: Any, *, packed: PackedRecipe, id_column: str | None, done: Ranges, epoch: int) -> pa.Table:
    return encode_foreign(packed.ready(), columns_of_block(block), id_column=id_column, done=done, epoch=epoch)


def iterate(dataset: ray.data.Dataset) -> Iterator[Block]:
    """Execute a dataset and yield its blocks, as references."""
    for block in blocks_of(dataset):
        cost = Cost(rows=block.rows, size_bytes=block.size_bytes, cpu_s=block.cpu_s, wall_s=block.wall_s)
        yield Block(ref=block.ref, cost=cost)
