"""The plan of a ``ray.data.Dataset``, as units of work for the pool: a part of a source, and the steps that follow it.

Ray documents neither a Dataset's operators nor its read tasks nor the functions of its steps. This module and its neighbours know them:
:mod:`offload.ray_private.data.executed` the part that Ray Data must execute first, :mod:`offload.ray_private.data.drafts` the sources,
:mod:`offload.ray_private.data.refusals` the steps that the pool cannot run, and :mod:`offload.ray_private.data.steps` how a step runs. A
contract test holds them to Ray (``tests/pipeline/test_ray_plan.py``).

Where it stops: :mod:`offload.pipeline.raydata.units` numbers the samples of a unit and transforms them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.data
from numpy.typing import NDArray
from ray.data import DataContext, RandomSeedConfig
from ray.data._internal.datasource.torch_datasource import TorchDatasource
from ray.data._internal.execution.operators.input_data_buffer import InputDataBuffer
from ray.data._internal.execution.operators.limit_operator import LimitOperator
from ray.data._internal.execution.operators.map_operator import MapOperator
from ray.data._internal.execution.operators.union_operator import UnionOperator
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators import (
    Filter,
    FlatMap,
    InputData,
    Limit,
    ListFiles,
    MapBatches,
    RandomizeBlocks,
    Read,
    ReadFiles,
    Repartition,
)
from ray.data._internal.logical.optimizers import LogicalOptimizer
from ray.data._internal.planner import create_planner

from offload.ray_private.data.drafts import (
    Draft,
    Unit,
    check_size,
    file_reads,
    least_tasks,
    limited,
    read_tasks,
    split,
    stored_blocks,
)
from offload.ray_private.data.executed import STEPS, Executed, execute_across
from offload.ray_private.data.refusals import NotTakenOverError, check_resources, left_to_ray
from offload.ray_private.data.steps import WINDOW_BYTES, Chain


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """The plan of a Dataset.

    Args:
        units: the units in the order of the Dataset.
        chains: the steps of units, by :attr:`Unit.chain`.
        identity: equal for plans with the same units in the same order.
        executed: the parts that Ray Data has executed already.
    """

    units: tuple[Unit, ...]
    chains: tuple[Chain, ...]
    identity: str
    executed: tuple[Executed, ...] = ()


def take_over(dataset: ray.data.Dataset, *, shuffle: bool = True, has_ids: bool = False) -> TakenOver:
    """The units and steps of a Dataset.

    Ray Data first executes the part up to the last step that needs rows of several blocks at once (sorts, joins, shuffles, …). This process
    then holds that part's rows, in the object store.

    Args:
        shuffle: whether units come in another order in every epoch.
        has_ids: whether the user's ids tell which samples an interrupted epoch had.

    Raises:
        NotTakenOverError: if a user's function comes before such a step, a later step takes whole blocks, or a step needs GPUs or other
            resources.
        ExecutionError: if Ray Data fails.
    """
    context = dataset.context.copy()
    context.execution_options.preserve_order = True  # list files in order: a resumed run must find the same units
    dag, executed = execute_across(
        _without_repartitions(dataset._logical_plan.dag), dataset, shuffle=shuffle, has_ids=has_ids
    )
    # A limit takes the first files of the order that Ray draws.
    shuffled = shuffle and not any(isinstance(op, Limit) for op in dag.post_order_iter())
    dag = dag._apply_transform(functools.partial(_prepared, shuffled=shuffled))
    optimized: Any = LogicalOptimizer().optimize(LogicalPlan(dag, context))
    physical, _ = create_planner().plan(optimized)
    walk = _PlanWalk(physical.op_map, context)
    sources = walk.drafts(physical.dag)
    for unit, _ in sources:
        check_size(unit)
    numbered = [(dataclasses.replace(unit, source=number), steps) for number, (unit, steps) in enumerate(sources)]
    drafts = list(split(numbered, walk.batch_size))
    chains: dict[tuple[Any, ...], int] = {}
    common = _common({steps: unit.packed_input for unit, steps in reversed(drafts)}.values())
    return TakenOver(
        units=tuple(
            dataclasses.replace(
                unit,
                packed_input=_packed(unit.packed_input, common),
                chain=chains.setdefault(steps, len(chains)),
                label=f"{unit.label} {unit.source}",
            )
            for unit, steps in drafts
        ),
        chains=tuple(Chain.of(steps, context, common) for steps in chains),
        identity=_identity(drafts) if walk.replayable else uuid.uuid4().hex,
        executed=executed,
    )


def _common(examples: Iterable[bytes]) -> bytes:
    """A dictionary for compression: read tasks of image files take 11 KB each, of which only some 200 bytes differ."""
    return b"".join(examples)[-WINDOW_BYTES:]


def _packed(pickled: bytes, common: bytes) -> bytes:
    packer = zlib.compressobj(zdict=common)
    return packer.compress(pickled) + packer.flush()


def _prepared(op: Any, *, shuffled: bool) -> Any:
    """The operator, changed so that its units are the same on every cluster and in every run.

    The number of read tasks no longer depends on the cluster. If units are ``shuffled`` in every epoch, Ray's shuffle of files goes.
    """
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
        return dataclasses.replace(op, parallelism=max(op.parallelism, least_tasks(size, rows)))
    if isinstance(op, RandomizeBlocks):  # offload orders the pass
        return op.input_dependencies[0]
    if isinstance(op, MapBatches) and any(map(_samples_anew, op.fn_args or ())):  # random_sample
        return dataclasses.replace(
            op, fn_args=[_UnitSeed() if _samples_anew(argument) else argument for argument in op.fn_args or ()]
        )
    return op


def _samples_anew(seed: Any) -> bool:
    return isinstance(seed, RandomSeedConfig) and (seed.seed is None or seed.reseed_after_execution)


class _UnitSeed:
    """A stand-in for a missing seed of ``random_sample``: it draws from the global generators, which are seeded for each unit."""

    def get_seed_tuple(self, *, data_context: DataContext) -> _UnitSeed:
        """Return itself: the number is drawn once a unit asks for it."""
        return self

    def to_rng_args(self, task_idx: int) -> NDArray[np.int64]:
        """The arguments of a unit's own generator."""
        return np.random.randint(1 << 31, size=4)


def _without_repartitions(dag: Any) -> Any:
    """The plan without steps that only move rows between blocks. They stay if a step takes whole blocks, since it may rely on them."""
    whole = any(isinstance(op, MapBatches) and op.batch_size is None for op in dag.post_order_iter())

    def left_out(op: Any) -> Any:
        moves = isinstance(op, Repartition) and not (op.keys or op.shuffle or op.sort)
        return op.input_dependencies[0] if moves and not whole else op

    return dag._apply_transform(left_out)


class _PlanWalk:
    """A walk from the end of a plan to its sources."""

    def __init__(self, logical: Mapping[Any, Any], context: DataContext) -> None:
        self.replayable = True
        self._logical, self._context = logical, context

    def drafts(self, op: Any) -> list[Draft]:
        """The units of an operator's output, in order."""
        logical = self._logical.get(op)
        if isinstance(op, UnionOperator):
            return [draft for source in op.input_dependencies for draft in self.drafts(source)]
        if isinstance(op, InputDataBuffer):
            self.replayable = self.replayable and not isinstance(logical, InputData)
            return list(stored_blocks(op))
        if isinstance(op, LimitOperator):
            return list(limited(self.drafts(op.input_dependencies[0]), op._limit, op.name))
        if not isinstance(op, MapOperator) or not isinstance(logical, (*STEPS, Read, ReadFiles)):
            raise left_to_ray(op.name, logical)
        check_resources(op.name, op._ray_remote_args, logical)
        if isinstance(logical, Read):
            return list(read_tasks(logical, op, self._context))
        if isinstance(logical, ReadFiles):
            return list(file_reads(op))
        rows = isinstance(logical, Filter | FlatMap) or logical.can_modify_num_rows
        return [
            (dataclasses.replace(unit, rows=None) if rows else unit, (*steps, op))
            for unit, steps in self.drafts(op.input_dependencies[0])
        ]

    def batch_size(self, step: Any) -> int | None:
        """The rows that a call of this step takes. None if its calls take single rows or whole blocks."""
        size = getattr(self._logical.get(step), "batch_size", None)
        return size if isinstance(size, int) else None


def _identity(drafts: Sequence[Draft]) -> str:
    """A digest that tells one Dataset's units from another's, by what Ray knows without reading: files, rows and sizes."""
    digest = hashlib.sha256()
    for unit, _ in drafts:
        digest.update(repr((unit.start, unit.stop, unit.inputs, unit.size_bytes, unit.named)).encode())
    return digest.hexdigest()[:16]
