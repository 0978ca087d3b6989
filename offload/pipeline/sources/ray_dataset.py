"""A ``ray.data.Dataset`` as a source of units, if the pool can take over its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from offload.errors import ConfigError, RunError
from offload.pipeline.sources.unit_maker import say_cause
from offload.pipeline.sources.units import UnitIndex

if TYPE_CHECKING:
    import ray.data


def units_of(dataset: ray.data.Dataset, *, shuffle: bool = True, has_ids: bool = False) -> UnitIndex | str:
    """The units of a Dataset, or the reason why Ray Data has to execute it. ``shuffle``: whether each epoch has an order of its own;
    ``has_ids``: whether the user's ids tell which samples an interrupted epoch had.

    If a step needs rows of several blocks at once, Ray Data executes the Dataset up to there first, which may take long. Raises RunError
    if that fails, and ConfigError for a Dataset without rows.
    """
    try:
        from offload.pipeline import ray_plan
    except ImportError as error:
        return f"offload does not know the plans of Ray {ray.__version__} ({error})"
    try:
        plan = ray_plan.take_over(dataset, shuffle=shuffle, has_ids=has_ids)
    except ray_plan.NotTakenOverError as error:
        return str(error)
    except ray_plan.ExecutionError as error:
        raise RunError(
            f"Ray Data could not execute the ray.data.Dataset: {error}, raised {say_cause(error)}."
        ) from None
    # Ray's internals may differ, and whatever else is wrong Ray Data says when it executes the Dataset.
    except Exception as error:
        return f"its plan cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    if not plan.units or all(unit.rows == 0 for unit in plan.units):
        raise ConfigError("the ray.data.Dataset has no rows.")
    known = [unit.rows for unit in plan.units if unit.rows is not None]
    table = pa.table(
        {
            "given": pa.array([unit.given for unit in plan.units], pa.large_binary()),
            "label": pa.array([unit.label for unit in plan.units]),
            "chain": pa.array([unit.chain for unit in plan.units], pa.int32()),
            "start": pa.array([unit.start for unit in plan.units], pa.int64()),
            "stop": pa.array([unit.stop for unit in plan.units], pa.int64()),
            "source": pa.array([unit.source for unit in plan.units], pa.int64()),
            "inputs": pa.array([unit.inputs for unit in plan.units], pa.int64()),
            "rows": pa.array([unit.rows for unit in plan.units], pa.int64()),
        }
    )
    return UnitIndex(
        table=table,
        chains=plan.chains,
        samples=sum(known) if len(known) == len(plan.units) else None,
        identity=plan.identity,
        notes=tuple(
            f"Ray Data executed it up to {part.step}, once for all epochs: {part.size_bytes / 2**20:,.1f} MiB in the object store"
            for part in plan.executed
        ),
    )
