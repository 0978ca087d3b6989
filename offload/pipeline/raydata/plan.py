"""The plan of a ``ray.data.Dataset``, as units of work for the pool: a read task or stored block, and the steps that follow it.

All that Ray does not document is in this file, with a contract test (``tests/pipeline/test_ray_plan.py``): a Dataset's operators, its
read tasks, and the functions of its steps. Ray Data's executor runs only the part up to the last step that needs rows of several blocks at
once, such as a join. Where it stops:
:mod:`offload.pipeline.raydata.units` numbers the samples of a unit and transforms them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from numpy.typing import NDArray
from ray import cloudpickle
from ray.data import DataContext, RandomSeedConfig
from ray.data._internal.compute import TaskPoolStrategy
from ray.data._internal.datasource.torch_datasource import TorchDatasource
from ray.data._internal.datasource_v2.formats.parquet.footer_file_indexer import (
    FooterFileIndexer,
    _file_chunks_to_manifest,
)
from ray.data._internal.datasource_v2.formats.parquet.footer_reader import FooterReader
from ray.data._internal.execution.interfaces.task_context import TaskContext
from ray.data._internal.execution.operators.input_data_buffer import InputDataBuffer
from ray.data._internal.execution.operators.limit_operator import LimitOperator
from ray.data._internal.execution.operators.map_operator import MapOperator
from ray.data._internal.execution.operators.union_operator import UnionOperator
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators import (
    AbstractFrom,
    Aggregate,
    Download,
    Filter,
    FlatMap,
    InputData,
    Join,
    Limit,
    ListFiles,
    MapBatches,
    MapRows,
    Project,
    RandomizeBlocks,
    RandomShuffle,
    Read,
    ReadFiles,
    Repartition,
    Sort,
    Union,
    Zip,
)
from ray.data._internal.logical.optimizers import LogicalOptimizer
from ray.data._internal.planner import create_planner
from ray.data.exceptions import SystemException
from ray.data.expressions import RandomExpr, UDFExpr, UUIDExpr

from offload.pipeline.raydata.runner import WINDOW_BYTES, Chain

UNIT_BYTES = 32 << 20
"""About as much as a unit reads: some tens of images, so that a pass is well shuffled."""
UNIT_ROWS = 1 << 16
"""At most, where the source may be read in parts or tells no size: a function of rows makes a dict of each."""
LEAST_UNITS, MOST_UNITS = 200, 20_000  # of one source
MOST_UNIT_BYTES = 256 << 20  # a unit is made at once; Ray Data streams the rows of a larger read task
SMALL_BYTES = 1 << 20  # of an input that several units may read anew, or that is not worth a unit of its own


SAME_ROWS = frozenset(("batch_readahead", "batch_size", "columns", "fragment_readahead", "fragments", "scan_in_order"))
"""Lance's ``scanner_options`` that leave all rows. Others, such as ``filter`` and ``limit``, need not."""

RANDOM_SPLIT = "Dataset.streaming_train_test_split.<locals>.random_split"
"""A function whose random numbers belong to tasks. Units of other rows would give both halves of the split some rows in common."""

READ_TASK, BLOCK = "read task", "block"
STEPS = (MapRows, MapBatches, Filter, FlatMap, Project)
ACROSS = (Sort, Join, Aggregate, Zip, RandomShuffle, Repartition)
"""Steps that need rows of several blocks at once."""
SAME_AGAIN = (Read, ReadFiles, ListFiles, AbstractFrom, InputData, Union, Limit, RandomizeBlocks, *ACROSS)
"""Steps that make the same rows whenever they run. A function of the user may draw random numbers."""


class NotTakenOverError(Exception):
    """A Dataset has a step that only Ray Data can execute. The message names it."""


class ExecutionError(Exception):
    """Ray Data could not execute a part of a Dataset. The message says why; the cause is Ray's error."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a Dataset that can be made by itself: some rows of an input, and the steps that follow.

    ``given``: the packed input, which is a read task, a block, or a reference to a block. ``start``, ``stop``: the input's rows that count
    (``stop`` None: to its end). ``inputs``: the number of these rows, ``rows``: the number of samples; None if only running it tells.
    ``chain``: the number of its steps. ``label`` is its name for users, ``named`` the files and parts that it reads, and ``source`` the
    number of its input.
    """

    given: bytes
    label: str
    size_bytes: int | None
    named: str = ""
    source: int = 0
    chain: int = 0
    start: int = 0
    stop: int | None = None
    inputs: int | None = None
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """The plan of a Dataset. ``identity`` is equal for plans with the same units in the same order. ``executed``: what Ray Data ran."""

    units: tuple[Unit, ...]
    chains: tuple[Chain, ...]
    identity: str
    executed: tuple[Executed, ...] = ()


@dataclass(frozen=True)
class Executed:
    """A part of a plan that Ray Data executed, up to ``step``. Its rows are in the object store."""

    step: str
    size_bytes: int


def take_over(dataset: ray.data.Dataset, *, shuffle: bool = True, has_ids: bool = False) -> TakenOver:
    """The units and steps of a Dataset. ``shuffle``: whether its units come in another order in every epoch; ``has_ids``: whether the
    user's ids tell which samples an interrupted epoch had.

    Ray Data executes the part up to the last step that needs rows of several blocks at once (sorts, joins, shuffles, …), and this
    process then holds its rows, in the object store.

    Raises NotTakenOverError if a user's function comes before such a step, whole blocks are asked for behind it, or a step needs GPUs or
    other resources; ExecutionError if Ray Data fails.
    """
    context = dataset.context.copy()
    context.execution_options.preserve_order = True  # of listed files: a resumed run must find the same units
    dag, executed = _executed(
        _without_repartitions(dataset._logical_plan.dag), dataset, shuffle=shuffle, has_ids=has_ids
    )
    # A limit takes the first files of the order that Ray draws.
    shuffled = shuffle and not any(isinstance(op, Limit) for op in dag.post_order_iter())
    dag = dag._apply_transform(functools.partial(_prepared, shuffled=shuffled))
    optimized: Any = LogicalOptimizer().optimize(LogicalPlan(dag, context))
    physical, _ = create_planner().plan(optimized)
    plan = _PlanWalk(physical.op_map, context)
    sources = plan.drafts(physical.dag)
    for unit, _ in sources:
        _check_size(unit)
    numbered = [(dataclasses.replace(unit, source=number), steps) for number, (unit, steps) in enumerate(sources)]
    drafts = list(plan.split(numbered))
    chains: dict[tuple[Any, ...], int] = {}
    common = _common({steps: unit.given for unit, steps in reversed(drafts)}.values())
    return TakenOver(
        units=tuple(
            dataclasses.replace(
                unit,
                given=_packed(unit.given, common),
                chain=chains.setdefault(steps, len(chains)),
                label=f"{unit.label} {unit.source}",
            )
            for unit, steps in drafts
        ),
        chains=tuple(Chain.of(steps, context, common) for steps in chains),
        identity=_identity(drafts) if plan.replayable else uuid.uuid4().hex,
        executed=executed,
    )


def _pickled(value: Any) -> bytes:
    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def _common(examples: Iterable[bytes]) -> bytes:
    """What the inputs of many units have in common: read tasks of image files take 11 KB each, and differ in some 200 bytes."""
    return b"".join(examples)[-WINDOW_BYTES:]


def _packed(given: bytes, common: bytes) -> bytes:
    packer = zlib.compressobj(zdict=common)
    return packer.compress(given) + packer.flush()


def _executed(dag: Any, dataset: ray.data.Dataset, *, shuffle: bool, has_ids: bool) -> tuple[Any, tuple[Executed, ...]]:
    """The plan whose last steps that need rows of several blocks, and all before these, are their stored rows instead."""
    last = list(_last_across(dag))
    _check_behind(dag, last)
    for op in last:
        _check_same_again(op, shuffle=shuffle)
        if has_ids:  # a driver that starts again has other units, but the same ids
            raise NotTakenOverError(f"its step {op.name} needs rows of several blocks at once, and it has an id_column")
    stored: dict[int, Any] = {}
    executed = []
    for op in last:
        if id(op) in stored:
            continue
        quiet = dataset.context.copy()
        quiet.enable_progress_bars = False
        quiet.raise_original_map_exception = True  # Ray's own says only that a function failed
        part = ray.data.Dataset(LogicalPlan(op, quiet), quiet, dataset._in_stats)
        try:
            found = part.materialize()
        except Exception as error:
            raise ExecutionError(f"its step {op.name}, or one before it") from _origin(error)
        stored[id(op)] = found._logical_plan.dag
        executed.append(Executed(op.name, found.size_bytes()))
    return dag._apply_transform(lambda op: stored.get(id(op), op)), tuple(executed)


def _origin(error: BaseException) -> BaseException:
    """The error that Ray's errors hold."""
    while True:
        inner = getattr(error, "cause", None) or error.__cause__
        if not isinstance(inner, BaseException) or isinstance(inner, SystemException):
            return error
        error = inner


def _last_across(op: Any) -> Iterator[Any]:
    """The last step that needs rows of several blocks, on each way from the end of a plan to its sources."""
    if isinstance(op, ACROSS):
        yield op
        return
    for each in op.input_dependencies:
        yield from _last_across(each)


def _check_behind(op: Any, last: Sequence[Any]) -> list[Any]:
    """Those of these steps that lie before ``op``. Raise NotTakenOverError for what the pool cannot run behind one: executing it would be
    in vain."""
    if any(op is each for each in last):
        return [op]
    before = [found for each in op.input_dependencies for found in _check_behind(each, last)]
    if not before:
        return []
    # Blocks as the user asked for them, such as the groups of map_groups.
    if isinstance(op, MapBatches) and op.batch_size is None and any(isinstance(each, Repartition) for each in before):
        raise NotTakenOverError(f"its step {op.name} takes the whole blocks that the step before it makes")
    if isinstance(op, STEPS):
        _check_resources(op.name, op.ray_remote_args, op)
    elif not isinstance(op, (Union, Limit, RandomizeBlocks)):
        raise _left_to_ray(op.name, op)
    return before


def _left_to_ray(name: str, logical: Any) -> NotTakenOverError:
    """The error for a step that the pool cannot run."""
    if isinstance(logical, Download):
        return NotTakenOverError(
            f"its step {name} downloads with processes of Ray Data (a function of map() can download, too)"
        )
    return NotTakenOverError(f"its step {name} needs rows of several blocks at once")


def _check_same_again(last: Any, *, shuffle: bool) -> None:
    """Raise NotTakenOverError for a part whose rows may differ from epoch to epoch: it must not run only once."""
    for op in last.post_order_iter():
        expressions = op.exprs if isinstance(op, Project) else [getattr(op, "predicate_expr", None)]
        if not isinstance(op, (*SAME_AGAIN, Project)) and expressions == [None]:
            raise NotTakenOverError(
                f"its step {last.name} needs rows of several blocks at once, and {op.name} before it may draw random numbers in every epoch"
            )
        if any(map(_draws, expressions)):
            raise NotTakenOverError(
                f"its step {last.name} needs rows of several blocks at once, and an expression before it may draw random numbers in "
                "every epoch"
            )
        if isinstance(op, RandomShuffle) and not shuffle:
            raise NotTakenOverError(f"its step {op.name} orders the rows anew in every epoch")


def _draws(expression: Any) -> bool:
    """Whether an expression may have another value when it is computed again."""
    if isinstance(expression, RandomExpr | UDFExpr | UUIDExpr):
        return True
    if isinstance(expression, list | tuple):
        return any(map(_draws, expression))
    return dataclasses.is_dataclass(expression) and any(
        _draws(getattr(expression, each.name)) for each in dataclasses.fields(expression)
    )


def _prepared(op: Any, *, shuffled: bool) -> Any:
    """The operator, with as many read tasks on every cluster, and without a shuffle of files if units are ``shuffled`` in every epoch: a
    resumed run must find the same ones."""
    if isinstance(op, ListFiles) and shuffled:
        return dataclasses.replace(op, shuffle_config_factory=lambda: None)
    if isinstance(op, Read):
        if isinstance(op.datasource_or_legacy_reader, TorchDatasource):
            raise NotTakenOverError(
                "its source reads a torch data set in one task (offload.from_torch reads one on every core)"
            )
        reader: Any = op.datasource_or_legacy_reader
        if shuffled and getattr(reader, "_shuffle", None) is not None:
            reader = copy.copy(reader)
            reader._shuffle = None
            op = dataclasses.replace(op, datasource=reader, datasource_or_legacy_reader=reader)
        size = reader.estimate_inmemory_data_size() or 0
        rows = op.infer_metadata().num_rows or 0
        tasks = min(max(math.ceil(size / UNIT_BYTES), math.ceil(rows / UNIT_ROWS), LEAST_UNITS), MOST_UNITS)
        return dataclasses.replace(op, parallelism=max(op.parallelism, tasks))
    if isinstance(op, RandomizeBlocks):  # the order of a pass is ours
        return op.input_dependencies[0]
    if isinstance(op, MapBatches) and any(map(_samples_anew, op.fn_args or ())):  # random_sample
        return dataclasses.replace(
            op, fn_args=[_UnitSeed() if _samples_anew(each) else each for each in op.fn_args or ()]
        )
    return op


def _samples_anew(seed: Any) -> bool:
    return isinstance(seed, RandomSeedConfig) and (seed.seed is None or seed.reseed_after_execution)


class _UnitSeed:
    """Stands for the seed that ``random_sample`` did not get: a number of the generators, which are seeded for each unit."""

    def get_seed_tuple(self, *, data_context: DataContext) -> _UnitSeed:
        """Return itself: the number is drawn once a unit asks for it."""
        return self

    def to_rng_args(self, task_idx: int) -> NDArray[np.int64]:
        """The arguments of a unit's own generator."""
        return np.random.randint(1 << 31, size=4)


def _without_repartitions(dag: Any) -> Any:
    """The plan without steps that only move rows between blocks, unless a later step takes whole blocks: it may count on them."""
    whole = any(isinstance(op, MapBatches) and op.batch_size is None for op in dag.post_order_iter())

    def left_out(op: Any) -> Any:
        moves = isinstance(op, Repartition) and not (op.keys or op.shuffle or op.sort)
        return op.input_dependencies[0] if moves and not whole else op

    return dag._apply_transform(left_out)


Draft = tuple[Unit, tuple[Any, ...]]
"""A unit, and the operators of its steps."""


class _PlanWalk:
    """A walk from the end of a plan to its sources."""

    def __init__(self, logical: Mapping[Any, Any], context: DataContext) -> None:
        self.replayable = True
        self._logical, self._context = logical, context

    def drafts(self, op: Any) -> list[Draft]:
        """The units of an operator's output, in order."""
        logical = self._logical.get(op)
        if isinstance(op, UnionOperator):
            return [draft for each in op.input_dependencies for draft in self.drafts(each)]
        if isinstance(op, InputDataBuffer):
            self.replayable = self.replayable and not isinstance(logical, InputData)
            return list(_stored(op))
        if isinstance(op, LimitOperator):
            return list(_limited(self.drafts(op.input_dependencies[0]), op._limit, op.name))
        if not isinstance(op, MapOperator) or not isinstance(logical, (*STEPS, Read, ReadFiles)):
            raise _left_to_ray(op.name, logical)
        _check_resources(op.name, op._ray_remote_args, logical)
        if isinstance(logical, Read):
            return list(self._read_tasks(logical, op))
        if isinstance(logical, ReadFiles):
            return list(_file_reads(op))
        rows = isinstance(logical, Filter | FlatMap) or logical.can_modify_num_rows
        return [
            (dataclasses.replace(unit, rows=None) if rows else unit, (*steps, op))
            for unit, steps in self.drafts(op.input_dependencies[0])
        ]

    def split(self, drafts: Sequence[Draft]) -> Iterator[Draft]:
        """The units, cut into parts if there are few, so that all cores have work: a step may take long for each row of a small file."""
        parts = math.ceil(LEAST_UNITS / max(len(drafts), 1))
        for unit, steps in drafts:
            stored = unit.label == BLOCK  # several units read it from the same memory
            small = unit.size_bytes is not None and unit.size_bytes <= SMALL_BYTES
            if not unit.inputs or not (stored or small):
                yield unit, steps
                continue
            sizes = [getattr(self._logical.get(step), "batch_size", None) for step in steps]
            least = max([size for size in sizes if isinstance(size, int)], default=1)
            count = max(1, min(parts, unit.inputs // least))
            if count == 1:
                yield unit, steps
                continue
            edges = np.linspace(unit.start, unit.start + unit.inputs, count + 1).astype(int).tolist()
            for start, stop in itertools.pairwise(edges):
                rows = None if unit.rows is None else stop - start
                yield dataclasses.replace(unit, start=start, stop=stop, inputs=stop - start, rows=rows), steps

    def _read_tasks(self, read: Read, op: Any) -> Iterator[Draft]:
        reader: Any = read.datasource_or_legacy_reader
        tasks = reader.get_read_tasks(
            read.parallelism, per_task_row_limit=read.per_block_limit, data_context=self._context
        )
        counted = _counts_rows(reader)
        for task in tasks:
            rows = task.metadata.num_rows if counted else None
            if rows is not None and read.per_block_limit is not None:
                rows = min(rows, read.per_block_limit)
            unit = Unit(
                given=_pickled(task),
                label=READ_TASK,
                size_bytes=task.metadata.size_bytes,
                named=" ".join(task.metadata.input_files or ()),
                inputs=rows,
                rows=rows,
            )
            yield unit, (op,)


def _counts_rows(reader: Any) -> bool:
    """Whether the rows that a source's read tasks name are those that they read. Those of Lance are the ones before any filter."""
    filtered = getattr(reader, "_predicate_expr", None) is not None
    return not filtered and set(getattr(reader, "scanner_options", ())) <= SAME_ROWS


def _file_reads(op: Any) -> Iterator[Draft]:
    """The units of files: runs of row groups, or whole files, as Ray's own listing names them."""
    listing = op.input_dependencies[0]
    paths: Iterable[Any] = [
        ray.get(entry.ref) for bundle in listing.input_dependencies[0]._input_data for entry in bundle.blocks
    ]
    # The second function of a listing packs files into read tasks, by the size of the cluster's blocks.
    given = listing.get_map_transformer().get_transform_fns()[0]._fn
    list_files = functools.partial(given, indexer=_ListsHere(given.keywords["indexer"]))
    found = [
        (manifest.slice(number, 1), manifest.column(CHUNK)[number].as_py() or {})
        for manifest in list_files(paths, TaskContext(task_idx=0, op_name=listing.name))
        for number in range(manifest.num_rows)
    ]
    total = sum(known.get("uncompressed_size", 0) for _, known in found)
    for part, known in _parts(found, min(max(total // LEAST_UNITS, SMALL_BYTES), UNIT_BYTES)):
        rows = known.get("num_rows") if known.get("fully_matched") else None
        unit = Unit(
            given=_pickled(part),
            label=READ_TASK,
            size_bytes=known.get("uncompressed_size"),
            named=repr(part.to_pylist()),
            inputs=rows,
            rows=rows,
        )
        yield unit, (op,)


FOOTERS_AT_ONCE = 32


class _ListsHere:
    """Ray's indexer of files, which reads Parquet's footers in this process. By itself it starts 32 actors for them."""

    def __init__(self, indexer: Any) -> None:
        self._indexer = indexer

    def list_files(self, paths: Any, **options: Any) -> Iterator[Any]:
        """List files, and the row groups of Parquet files."""
        if not isinstance(self._indexer, FooterFileIndexer):
            yield from self._indexer.list_files(paths, **options)
            return
        predicate, columns = options.pop("predicate"), options.pop("projected_columns")
        del options["limit"]  # it would stop somewhere; the plan's own limit counts rows
        files = self._indexer._iter_file_infos_for_list(paths, **options)
        threads = pa.io_thread_count()
        reader = FooterReader(options["filesystem"], FOOTERS_AT_ONCE, predicate, columns)
        try:
            sizes = [(file.path, file.size) for file in files if file.size is not None]
            read_footers: Any = reader.read_footers  # typed as a method of an actor
            for found in read_footers(sizes, preserve_order=True):
                yield from map(_file_chunks_to_manifest, found)
        finally:
            reader.pool.shutdown(cancel_futures=True)
            pa.set_io_thread_count(threads)


CHUNK, PATH = "__file_chunk_metadata", "__path"

Part = tuple[pa.Table, Mapping[str, Any]]
"""A row of a listing: a file or some of its row groups, and what is known of them."""


def _parts(found: Sequence[Part], size_bytes: int) -> Iterator[Part]:
    """The listed row groups, in parts of about ``size_bytes``; files without known row groups as they are."""
    for (_, grouped), rows in itertools.groupby(found, lambda each: (each[0].column(PATH)[0].as_py(), bool(each[1]))):
        if not grouped:
            yield from ((_rebuilt(row, row.to_pylist()), known) for row, known in rows)
            continue
        each = list(rows)
        row, last = each[0]
        groups: list[tuple[int, int, int]] = []
        size = 0
        for matched, number, count, bytes_ in (
            (known["fully_matched"], *group) for _, known in each for group in _row_groups(known)
        ):
            if groups and (size + bytes_ > size_bytes or matched != last["fully_matched"]):
                yield _of_groups(row, last, groups)
                groups, size = [], 0
            last = {**last, "fully_matched": matched}
            groups.append((number, count, bytes_))
            size += bytes_
        yield _of_groups(row, last, groups)


def _row_groups(known: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """(number, rows, bytes) of each listed row group."""
    numbers = known["row_group_ids"]
    if len(numbers) == 1:
        return [(numbers[0], known["num_rows"], known["uncompressed_size"])]
    return list(zip(numbers, known["rg_rows"], known["rg_sizes"], strict=True))


def _of_groups(row: pa.Table, known: Mapping[str, Any], groups: Sequence[tuple[int, int, int]]) -> Part:
    numbers, rows, sizes = zip(*groups, strict=True)
    part = {
        **known,
        "row_group_ids": list(numbers),
        "num_rows": sum(rows),
        "uncompressed_size": sum(sizes),
        "rg_rows": [],
        "rg_sizes": [],
    }
    return _rebuilt(row, [{**row.to_pylist()[0], CHUNK: part}]), part


def _rebuilt(row: pa.Table, values: list[dict[str, Any]]) -> pa.Table:
    """A row of its own: pickling a slice would take the whole listing along."""
    return pa.Table.from_pylist(values, schema=row.schema)


def _stored(op: Any) -> Iterator[Draft]:
    """The units of blocks in the object store, large ones cut into parts."""
    for bundle in op._input_data:
        for entry, cut in zip(bundle.blocks, bundle.slices, strict=True):
            rows, size = entry.metadata.num_rows, entry.metadata.size_bytes
            start, stop = (0, rows) if cut is None else (cut.start_offset, cut.end_offset)
            unit = Unit(given=_pickled(entry.ref), label=BLOCK, size_bytes=size)
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


def _limited(drafts: Sequence[Draft], limit: int, name: str) -> Iterator[Draft]:
    """The first ``limit`` samples of these units."""
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


def _check_resources(name: str, given: Mapping[str, Any], logical: Any) -> None:
    """Raise NotTakenOverError if a step needs what a preprocessing core does not have."""
    if given.get("num_gpus"):
        raise NotTakenOverError(f"its step {name} takes GPUs")
    for setting in ("resources", "runtime_env", "accelerator_type", "label_selector"):
        if given.get(setting):
            raise NotTakenOverError(f"its step {name} sets {setting}")
    if getattr(logical, "ray_remote_args_fn", None) is not None:
        raise NotTakenOverError(f"its step {name} sets ray_remote_args_fn")
    if isinstance(logical.compute, TaskPoolStrategy) and logical.compute.size is not None:
        raise NotTakenOverError(f"its step {name} limits its concurrency")
    if getattr(getattr(logical, "fn", None), "__qualname__", "") == RANDOM_SPLIT:
        raise NotTakenOverError(
            f'its step {name} draws by the tasks of Ray Data (pass split_type="hash", or take train_test_split)'
        )


def _check_size(unit: Unit) -> None:
    """Raise NotTakenOverError for a unit that may not fit into memory."""
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


def _identity(drafts: Sequence[Draft]) -> str:
    """What tells the units of one Dataset from those of another, as far as Ray knows it without reading: files, rows and sizes."""
    found = hashlib.sha256()
    for unit, _ in drafts:
        found.update(repr((unit.start, unit.stop, unit.inputs, unit.size_bytes, unit.named)).encode())
    return found.hexdigest()[:16]
