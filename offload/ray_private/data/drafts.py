"""The units of the sources of a ``ray.data.Dataset``: read tasks, parts of files, and blocks in the object store.

A unit should be small enough that a pass is well shuffled and all cores have work, and large enough that its own cost does not matter.
Where it stops: :mod:`offload.ray_private.data.dataset_plan` knows the steps that follow a source, and packs the units.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import cloudpickle
from ray.data import DataContext
from ray.data._internal.datasource_v2.formats.parquet.footer_file_indexer import (
    FooterFileIndexer,
    _file_chunks_to_manifest,
)
from ray.data._internal.datasource_v2.formats.parquet.footer_reader import FooterReader
from ray.data._internal.execution.interfaces.task_context import TaskContext
from ray.data._internal.logical.operators import Read

from offload.ray_private.data.refusals import NotTakenOverError

UNIT_BYTES = 32 << 20
"""The size that a unit should read: some tens of images, so that a pass is well shuffled."""
UNIT_ROWS = 1 << 16
"""The most rows of a unit whose source can be read in parts or tells no size: a function of rows makes a dict of each."""
LEAST_UNITS, MOST_UNITS = 200, 20_000  # bounds of the number of units of one source
MOST_UNIT_BYTES = 256 << 20  # a unit is made at once; Ray Data streams the rows of a larger read task
SMALL_BYTES = 1 << 20  # an input of this size may be read again by several units, and is not worth a unit of its own

SAME_ROWS = frozenset(("batch_readahead", "batch_size", "columns", "fragment_readahead", "fragments", "scan_in_order"))
"""Lance's ``scanner_options`` that keep all rows. Others, such as ``filter`` and ``limit``, may drop some."""

READ_TASK, BLOCK = "read task", "block"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a Dataset that can be made by itself: some rows of an input, and the steps that follow.

    Args:
        packed_input: the pickled input, which is a read task, a listed file, or a reference to a block. A finished plan also compresses it.
        label: the unit's name for users.
        size_bytes: the size of the input. None: unknown.
        named: the files and parts that it reads.
        source: the number of its input.
        chain: the number of its steps among the plan's chains.
        start, stop: the rows of the input that count. ``stop`` None: to its end.
        inputs: the number of these rows. None: unknown.
        rows: the number of samples. None: only running it tells.
    """

    packed_input: bytes
    label: str
    size_bytes: int | None
    named: str = ""
    source: int = 0
    chain: int = 0
    start: int = 0
    stop: int | None = None
    inputs: int | None = None
    rows: int | None = None


Draft = tuple[Unit, tuple[Any, ...]]
"""A unit, and the operators of its steps."""


def _pickled(value: Any) -> bytes:
    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def least_tasks(size_bytes: int, rows: int) -> int:
    """The least number of read tasks for a source of this size, in bytes and in rows."""
    return min(max(math.ceil(size_bytes / UNIT_BYTES), math.ceil(rows / UNIT_ROWS), LEAST_UNITS), MOST_UNITS)


def read_tasks(read: Read, op: Any, context: DataContext) -> Iterator[Draft]:
    """The units of a source's read tasks."""
    reader: Any = read.datasource_or_legacy_reader
    tasks = reader.get_read_tasks(read.parallelism, per_task_row_limit=read.per_block_limit, data_context=context)
    counted = _counts_rows(reader)
    for task in tasks:
        rows = task.metadata.num_rows if counted else None
        if rows is not None and read.per_block_limit is not None:
            rows = min(rows, read.per_block_limit)
        unit = Unit(
            packed_input=_pickled(task),
            label=READ_TASK,
            size_bytes=task.metadata.size_bytes,
            named=" ".join(task.metadata.input_files or ()),
            inputs=rows,
            rows=rows,
        )
        yield unit, (op,)


def _counts_rows(reader: Any) -> bool:
    """Return whether a source's read tasks name the rows that they will read. Lance names the rows before any filter."""
    filtered = getattr(reader, "_predicate_expr", None) is not None
    return not filtered and set(getattr(reader, "scanner_options", ())) <= SAME_ROWS


def file_reads(op: Any) -> Iterator[Draft]:
    """The units of files: runs of row groups, or whole files, as Ray's own listing names them."""
    listing = op.input_dependencies[0]
    paths: Iterable[Any] = [
        ray.get(entry.ref) for bundle in listing.input_dependencies[0]._input_data for entry in bundle.blocks
    ]
    # Only the first function of the listing. The second one packs files into read tasks by the cluster's block size.
    listing_function = listing.get_map_transformer().get_transform_fns()[0]._fn
    list_files = functools.partial(listing_function, indexer=_ListsHere(listing_function.keywords["indexer"]))
    listed = [
        (manifest.slice(number, 1), manifest.column(CHUNK)[number].as_py() or {})
        for manifest in list_files(paths, TaskContext(task_idx=0, op_name=listing.name))
        for number in range(manifest.num_rows)
    ]
    total = sum(known.get("uncompressed_size", 0) for _, known in listed)
    for part, known in _parts(listed, min(max(total // LEAST_UNITS, SMALL_BYTES), UNIT_BYTES)):
        rows = known.get("num_rows") if known.get("fully_matched") else None
        unit = Unit(
            packed_input=_pickled(part),
            label=READ_TASK,
            size_bytes=known.get("uncompressed_size"),
            named=repr(part.to_pylist()),
            inputs=rows,
            rows=rows,
        )
        yield unit, (op,)


FOOTERS_AT_ONCE = 32


class _ListsHere:
    """Ray's indexer of files, made to read Parquet footers in this process. By itself it starts 32 actors for that."""

    def __init__(self, indexer: Any) -> None:
        self._indexer = indexer

    def list_files(self, paths: Any, **options: Any) -> Iterator[Any]:
        """List files, and the row groups of Parquet files."""
        if not isinstance(self._indexer, FooterFileIndexer):
            yield from self._indexer.list_files(paths, **options)
            return
        predicate, columns = options.pop("predicate"), options.pop("projected_columns")
        del options["limit"]  # it would stop at an arbitrary file, while the plan's own limit counts rows
        files = self._indexer._iter_file_infos_for_list(paths, **options)
        threads = pa.io_thread_count()
        reader = FooterReader(options["filesystem"], FOOTERS_AT_ONCE, predicate, columns)
        try:
            sizes = [(file.path, file.size) for file in files if file.size is not None]
            read_footers: Any = reader.read_footers  # typed as a method of an actor
            for chunks in read_footers(sizes, preserve_order=True):
                yield from map(_file_chunks_to_manifest, chunks)
        finally:
            reader.pool.shutdown(cancel_futures=True)
            pa.set_io_thread_count(threads)


CHUNK, PATH = "__file_chunk_metadata", "__path"

Part = tuple[pa.Table, Mapping[str, Any]]
"""A row of a listing (a file or some of its row groups), and its facts."""


def _parts(listed: Sequence[Part], size_bytes: int) -> Iterator[Part]:
    """Group the listed row groups in parts of about ``size_bytes``. Files without known row groups stay as they are."""
    for (_, grouped), rows in itertools.groupby(listed, _file_of):
        if not grouped:
            yield from ((_rebuilt(row, row.to_pylist()), known) for row, known in rows)
            continue
        of_file = list(rows)
        row, last = of_file[0]
        groups: list[tuple[int, int, int]] = []
        size = 0
        for matched, number, count, bytes_ in (
            (known["fully_matched"], *group) for _, known in of_file for group in _row_groups(known)
        ):
            if groups and (size + bytes_ > size_bytes or matched != last["fully_matched"]):
                yield _part(row, last, groups)
                groups, size = [], 0
            last = {**last, "fully_matched": matched}
            groups.append((number, count, bytes_))
            size += bytes_
        yield _part(row, last, groups)


def _file_of(part: Part) -> tuple[str, bool]:
    """(path, whether its row groups are known)"""
    row, known = part
    return row.column(PATH)[0].as_py(), bool(known)


def _row_groups(known: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """(number, rows, bytes) of each listed row group."""
    numbers = known["row_group_ids"]
    if len(numbers) == 1:
        return [(numbers[0], known["num_rows"], known["uncompressed_size"])]
    return list(zip(numbers, known["rg_rows"], known["rg_sizes"], strict=True))


def _part(row: pa.Table, known: Mapping[str, Any], groups: Sequence[tuple[int, int, int]]) -> Part:
    """The part of a file with these row groups: (number, rows, bytes) of each."""
    numbers, rows, sizes = zip(*groups, strict=True)
    facts = {
        **known,
        "row_group_ids": list(numbers),
        "num_rows": sum(rows),
        "uncompressed_size": sum(sizes),
        "rg_rows": [],
        "rg_sizes": [],
    }
    return _rebuilt(row, [{**row.to_pylist()[0], CHUNK: facts}]), facts


def _rebuilt(row: pa.Table, values: list[dict[str, Any]]) -> pa.Table:
    """A listing of one row. Pickling a slice of the whole listing would carry all of it along."""
    return pa.Table.from_pylist(values, schema=row.schema)


def stored_blocks(op: Any) -> Iterator[Draft]:
    """The units of blocks in the object store, large ones cut into parts."""
    for bundle in op._input_data:
        for entry, cut in zip(bundle.blocks, bundle.slices, strict=True):
            rows, size = entry.metadata.num_rows, entry.metadata.size_bytes
            start, stop = (0, rows) if cut is None else (cut.start_offset, cut.end_offset)
            unit = Unit(packed_input=_pickled(entry.ref), label=BLOCK, size_bytes=size)
            if stop is None:
                yield unit, ()
                continue
            if start == stop:  # sorts and joins leave empty blocks
                continue
            parts = max(1, min(stop - start, round((size or 0) / UNIT_BYTES)))
            edges = np.linspace(start, stop, parts + 1).astype(int).tolist()
            for first, last in itertools.pairwise(edges):
                count = last - first
                share = None if size is None else size * count // (rows or stop - start)
                yield dataclasses.replace(unit, size_bytes=share, start=first, stop=last, inputs=count, rows=count), ()


def limited(drafts: Sequence[Draft], limit: int, name: str) -> Iterator[Draft]:
    """The first ``limit`` samples of these units. Raises NotTakenOverError if only running a unit tells its rows."""
    left = limit
    for unit, steps in drafts:
        if left <= 0:
            return
        if unit.rows is None:
            raise NotTakenOverError(f"its step {name} follows steps whose number of rows only running them tells")
        rows = min(unit.rows, left)
        left -= rows
        whole = rows == unit.rows
        yield unit if whole else dataclasses.replace(unit, inputs=rows, rows=rows, stop=unit.start + rows), steps


def split(drafts: Sequence[Draft], batch_size: Callable[[Any], int | None]) -> Iterator[Draft]:
    """The units, cut into parts if there are few, so that all cores have work: a step may take long even for a small file.

    ``batch_size`` returns the rows of a step's batches.
    """
    parts = math.ceil(LEAST_UNITS / max(len(drafts), 1))
    for unit, steps in drafts:
        stored = unit.label == BLOCK  # several units read it from the same memory
        small = unit.size_bytes is not None and unit.size_bytes <= SMALL_BYTES
        if not unit.inputs or not (stored or small):
            yield unit, steps
            continue
        # A part must fill the largest batch of its steps.
        least = max([size for step in steps if (size := batch_size(step)) is not None], default=1)
        count = max(1, min(parts, unit.inputs // least))
        if count == 1:
            yield unit, steps
            continue
        edges = np.linspace(unit.start, unit.start + unit.inputs, count + 1).astype(int).tolist()
        for start, stop in itertools.pairwise(edges):
            rows = None if unit.rows is None else stop - start
            yield dataclasses.replace(unit, start=start, stop=stop, inputs=stop - start, rows=rows), steps


def check_size(unit: Unit) -> None:
    """Raise NotTakenOverError for a unit that may not fit into memory: the pool makes it as a whole."""
    if unit.size_bytes is None and unit.inputs is None:
        raise NotTakenOverError("its source tells neither the size nor the rows of a read task")
    if unit.size_bytes is None and (unit.inputs or 0) > UNIT_ROWS:
        raise NotTakenOverError(
            f"a read task reads {unit.inputs:,} rows at once (more than {UNIT_ROWS:,}), and its source does not tell their size"
        )
    if (unit.size_bytes or 0) > MOST_UNIT_BYTES:
        raise NotTakenOverError(
            f"a read task reads {(unit.size_bytes or 0) / 2**20:,.0f} MiB at once (more than {MOST_UNIT_BYTES >> 20})"
        )
