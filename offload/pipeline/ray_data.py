"""``ray.data.Dataset`` sources, which run as the user's own Ray Data pipeline, followed by the transform and the wire format.

Everything that offload uses of Ray Data beyond its everyday API is in this file, with a contract test:
``iter_internal_ref_bundles`` is a developer API, and the fields of a block's statistics have moved between releases.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import DataContext

from offload.pipeline.block_columns import columns_of_block
from offload.pipeline.foreign import encode_foreign
from offload.pipeline.pool import Block, Cost, PackedRecipe
from offload.pipeline.ranges import Ranges


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
    dataset.context.raise_original_map_exception = True  # Ray's own says only that a function failed
    options = dataset.context.execution_options
    limits = options.resource_limits
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
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            stats = entry.metadata.exec_stats
            cost = Cost(
                rows=int(entry.metadata.num_rows or 0),
                size_bytes=int(entry.metadata.size_bytes or 0),
                cpu_s=float(getattr(stats, "cpu_time_s", None) or math.nan),
                wall_s=float(getattr(stats, "wall_time_s", None) or math.nan),
            )
            yield Block(ref=entry.ref, cost=cost)
