"""All that offload uses of Ray Data beyond its everyday API, in one file with a contract test.

``iter_internal_ref_bundles`` is a developer API, and the fields of a block's execution statistics have moved between
releases. Where it stops: no policy; sizes and limits come from outside.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, ExecutionResources

from offload.pipeline import stage as stages
from offload.pipeline.ranges import Ranges
from offload.pipeline.stage import Stage
from offload.pipeline.wire import Columns


@dataclass(frozen=True, kw_only=True)
class Block:
    """A finished block: where it is, and what it cost on one core."""

    ref: ray.ObjectRef[pa.Table]
    rows: int
    size_bytes: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class PackedStage:
    """A stage in the object store, with the key under which a process keeps it unpickled."""

    key: str
    ref: ray.ObjectRef[np.ndarray[Any, Any]]

    @classmethod
    def of(cls, stage: Stage) -> PackedStage:
        packed = stages.pack(stage)
        return cls(key=hashlib.blake2b(packed.tobytes(), digest_size=16).hexdigest(), ref=ray.put(packed))

    def ready(self) -> Stage:
        """The stage, unpickled once per process."""
        return stages.unpack(self.key, lambda: ray.get(self.ref))


def configure(*, store_bytes: float) -> None:
    """Set this process's Ray Data context for pipelines of blocks that we size ourselves."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = None  # a task's output is one block
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=store_bytes)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _process(rows: pa.Table, *, packed: PackedStage, epoch: int) -> pa.Table:
    return stages.process(packed.ready(), rows, epoch=epoch)


class _Actor:
    """A stage with set-up: constructed once in this actor."""

    def __init__(self, packed: PackedStage, epoch: int) -> None:
        self.stage, self.epoch = packed.ready(), epoch

    def __call__(self, rows: pa.Table) -> pa.Table:
        return stages.process(self.stage, rows, epoch=self.epoch)


def preprocess(
    blocks: Sequence[pa.Table], packed: PackedStage, *, epoch: int, task_cpus: float, actors: int | None = None
) -> Iterator[Block]:
    """Run the stage over these blocks of index rows, a task each, and yield the finished blocks in the same order.

    ``actors``: at the most so many actors instead of tasks. Dropping the iterator ends the execution.
    """
    dataset = ray.data.from_blocks(list(blocks))
    if actors is not None:
        dataset = dataset.map_batches(
            _Actor,
            batch_size=None,
            batch_format="pyarrow",
            fn_constructor_kwargs={"packed": packed, "epoch": epoch},
            # Two tasks in flight per actor: the next one is there when one ends.
            compute=ActorPoolStrategy(min_size=1, max_size=actors, max_tasks_in_flight_per_actor=2),
            num_cpus=task_cpus,
        )
    else:
        dataset = dataset.map_batches(
            _process,
            batch_size=None,
            batch_format="pyarrow",
            fn_kwargs={"packed": packed, "epoch": epoch},
            num_cpus=task_cpus,
        )
    return iterate(dataset)


def _encode(columns: Columns, *, packed: PackedStage, id_column: str | None, done: Ranges) -> pa.Table:
    return stages.encode_foreign(packed.ready(), columns, id_column=id_column, done=done)


class _EncodeActor:
    def __init__(self, packed: PackedStage, id_column: str | None, done: Ranges) -> None:
        self.stage, self.id_column, self.done = packed.ready(), id_column, done

    def __call__(self, columns: Columns) -> pa.Table:
        return stages.encode_foreign(self.stage, columns, id_column=self.id_column, done=self.done)


def encode_dataset(
    dataset: ray.data.Dataset,
    packed: PackedStage,
    *,
    id_column: str | None,
    done: Ranges,
    task_cpus: float,
    actors: int | None = None,
) -> Iterator[Block]:
    """Run a user's own dataset, its transform behind it, and yield its blocks in the wire format."""
    kwargs = {"packed": packed, "id_column": id_column, "done": done}
    dataset.context.enable_progress_bars = False
    if actors is not None:
        # The dataset's own tasks need a core too: with all of them held by actors it would wait forever.
        pool = ActorPoolStrategy(min_size=1, max_size=max(1, actors - 1), max_tasks_in_flight_per_actor=2)
        encoded = dataset.map_batches(
            _EncodeActor,
            batch_size=None,
            batch_format="numpy",
            fn_constructor_kwargs=kwargs,
            compute=pool,
            num_cpus=task_cpus,
        )
    else:
        encoded = dataset.map_batches(
            _encode,  # type: ignore[arg-type]  # a batch may come as lists too
            batch_size=None,
            batch_format="numpy",
            fn_kwargs=kwargs,
            num_cpus=task_cpus,
        )
    return iterate(encoded)


def iterate(dataset: ray.data.Dataset) -> Iterator[Block]:
    """Execute a dataset and yield its blocks, as references, in order."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            stats = entry.metadata.exec_stats
            yield Block(
                ref=entry.ref,
                rows=int(entry.metadata.num_rows or 0),
                size_bytes=int(entry.metadata.size_bytes or 0),
                cpu_s=float(getattr(stats, "cpu_time_s", None) or math.nan),
                wall_s=float(getattr(stats, "wall_time_s", None) or math.nan),
            )
