"""The blocks of a ``ray.data.Dataset`` that Ray Data executes, as references with what Ray measured.

``iter_internal_ref_bundles`` is a developer API, and a bundle's entries have moved between releases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.data

from offload.ray_private.part import Part

PART = Part(
    name="blocks of Ray Data",
    purpose="hand the blocks of a Dataset that Ray Data executes to workers where they are",
    without="this process fetches each block and stores it again",
    cost="all blocks of such a Dataset pass through one process, and their CPU time is unknown",
    needs=(
        "ray.data:Dataset.iter_internal_ref_bundles",
        "ray.data._internal.execution.interfaces:RefBundle.blocks",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Executed:
    """A block: its reference, its size, and the time of its task (NaN: unknown)."""

    ref: Any
    rows: int
    size_bytes: int
    cpu_s: float = math.nan
    wall_s: float = math.nan


def blocks_of(dataset: ray.data.Dataset) -> Iterator[Executed]:
    """Execute a Dataset and yield its blocks. Dropping the iterator ends the execution."""
    if PART.available():
        for bundle in dataset.iter_internal_ref_bundles():
            yield from map(_executed, bundle.blocks)
    else:
        tables: Any = dataset.iter_batches(batch_size=None, batch_format="pyarrow")
        for table in tables:
            whole: pa.Table = table
            yield Executed(ref=ray.put(whole), rows=whole.num_rows, size_bytes=whole.nbytes)


def _executed(entry: Any) -> Executed:
    ref, metadata = entry[:2] if isinstance(entry, tuple) else (entry.ref, entry.metadata)
    stats = getattr(metadata, "exec_stats", None)
    return Executed(
        ref=ref,
        rows=int(metadata.num_rows or 0),
        size_bytes=int(metadata.size_bytes or 0),
        cpu_s=float(getattr(stats, "cpu_time_s", None) or math.nan),
        wall_s=float(getattr(stats, "wall_time_s", None) or math.nan),
    )
