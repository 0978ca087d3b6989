"""The part of a ``ray.data.Dataset`` that Ray Data executes before the pool takes over: up to the last step across blocks.

A step across blocks, such as a sort or a join, needs rows of several blocks at once. Ray Data runs it, and the steps before it, only once
for all epochs. So the rows of this part must be the same in every epoch. Where it stops: the pool runs all later steps
(:mod:`offload.ray_private.data.dataset_plan`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray.data
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators import (
    AbstractFrom,
    Aggregate,
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
from ray.data.exceptions import SystemException
from ray.data.expressions import RandomExpr, UDFExpr, UUIDExpr

from offload.ray_private.data.refusals import NotTakenOverError, check_resources, left_to_ray

STEPS = (MapRows, MapBatches, Filter, FlatMap, Project)
ACROSS = (Sort, Join, Aggregate, Zip, RandomShuffle, Repartition)
"""Steps that need rows of several blocks at once."""
SAME_AGAIN = (Read, ReadFiles, ListFiles, AbstractFrom, InputData, Union, Limit, RandomizeBlocks, *ACROSS)
"""Steps that make the same rows whenever they run. A function of the user may draw random numbers."""


class ExecutionError(Exception):
    """Ray Data could not execute a part of a Dataset. The message says why; the cause is Ray's error."""


@dataclass(frozen=True)
class Executed:
    """A part of a plan that Ray Data executed, up to ``step``. The object store holds its rows."""

    step: str
    size_bytes: int


def execute_across(
    dag: Any, dataset: ray.data.Dataset, *, shuffle: bool, has_ids: bool
) -> tuple[Any, tuple[Executed, ...]]:
    """Execute the last steps across blocks, and replace each in the plan by its stored rows: (plan, the executed parts).

    Raises NotTakenOverError if this part may give other rows in another epoch, or if the pool cannot run the steps after it;
    ExecutionError if Ray Data fails.
    """
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
        quiet.raise_original_map_exception = True  # Ray's own error only says that a function failed
        part = ray.data.Dataset(LogicalPlan(op, quiet), quiet, dataset._in_stats)
        try:
            rows = part.materialize()
        except Exception as error:
            raise ExecutionError(f"its step {op.name}, or one before it") from _origin(error)
        stored[id(op)] = rows._logical_plan.dag
        executed.append(Executed(op.name, rows.size_bytes()))
    return dag._apply_transform(lambda op: stored.get(id(op), op)), tuple(executed)


def _origin(error: BaseException) -> BaseException:
    """The error inside Ray's errors."""
    while True:
        inner = getattr(error, "cause", None) or error.__cause__
        if not isinstance(inner, BaseException) or isinstance(inner, SystemException):
            return error
        error = inner


def _last_across(op: Any) -> Iterator[Any]:
    """The last step across blocks on each path from the end of a plan to its sources."""
    if isinstance(op, ACROSS):
        yield op
        return
    for source in op.input_dependencies:
        yield from _last_across(source)


def _check_behind(op: Any, last: Sequence[Any]) -> list[Any]:
    """Check the steps from ``last`` on to ``op``, and return the steps of ``last`` that come before it.

    Raises NotTakenOverError for a step that the pool cannot run: Ray Data must not execute a part in vain.
    """
    if any(op is step for step in last):
        return [op]
    before = [step for source in op.input_dependencies for step in _check_behind(source, last)]
    if not before:
        return []
    # Blocks as the user asked for them, such as the groups of map_groups.
    if isinstance(op, MapBatches) and op.batch_size is None and any(isinstance(step, Repartition) for step in before):
        raise NotTakenOverError(f"its step {op.name} takes the whole blocks that the step before it makes")
    if isinstance(op, STEPS):
        check_resources(op.name, op.ray_remote_args, op)
    elif not isinstance(op, (Union, Limit, RandomizeBlocks)):
        raise left_to_ray(op.name, op)
    return before


def _check_same_again(last: Any, *, shuffle: bool) -> None:
    """Raise NotTakenOverError for a part whose rows may differ from epoch to epoch, so it must not run only once."""
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
    """Return whether an expression may have another value when it is computed again."""
    if isinstance(expression, RandomExpr | UDFExpr | UUIDExpr):
        return True
    if isinstance(expression, list | tuple):
        return any(map(_draws, expression))
    return dataclasses.is_dataclass(expression) and any(
        _draws(getattr(expression, field.name)) for field in dataclasses.fields(expression)
    )
