"""A ``ray.data.Dataset`` as a source: of units of work, if the pool can take over its plan, or of rows.

Passes that pick samples one by one (mixed with other sources, or drawn by weight) need an index of rows: a unit's number and a row in it.
So the number of rows of each unit must be known. Passes over a Dataset alone need no such numbers (:mod:`offload.pipeline.raydata.units`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from offload.errors import ConfigError, RunError
from offload.pipeline.raydata.unit_maker import say_cause
from offload.pipeline.raydata.units import UnitIndex

if TYPE_CHECKING:
    import ray.data
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.pipeline.index.rows import Runs
from offload.pipeline.index.source import At, Index, Reader, Samples, nowhere
from offload.pipeline.raydata.unit_maker import UnitMaker, UnitSamples, gathered
from offload.ray_private.data import PLANS

if TYPE_CHECKING:
    import ray.data

    from offload.pipeline.raydata.runner import Chain


def units_of(dataset: ray.data.Dataset, *, shuffle: bool = True, has_ids: bool = False) -> UnitIndex | str:
    """The units of a Dataset, or the reason why Ray Data has to execute it.

    ``shuffle``: whether each epoch has an order of its own. ``has_ids``: whether the user's ids tell the samples of an interrupted epoch.

    If a step needs rows of several blocks at once, Ray Data executes the Dataset up to there first, which may take long. Raises RunError
    if that fails, and ConfigError for a Dataset without rows.
    """
    if (lacking := PLANS.lacking()) is not None:
        import ray

        return f"offload does not know the plans of Ray {ray.__version__} (it lacks {lacking})"
    from offload.ray_private.data.dataset_plan import take_over
    from offload.ray_private.data.executed import ExecutionError
    from offload.ray_private.data.refusals import NotTakenOverError

    try:
        plan = take_over(dataset, shuffle=shuffle, has_ids=has_ids)
    except NotTakenOverError as error:
        return str(error)
    except ExecutionError as error:
        raise RunError(
            f"Ray Data could not execute the ray.data.Dataset: {error}, raised {say_cause(error)}."
        ) from None
    # Ray's internals may differ. If the Dataset itself is wrong, Ray Data says so when it executes it.
    except Exception as error:
        return f"its plan cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    if not plan.units or all(unit.rows == 0 for unit in plan.units):
        raise ConfigError("the ray.data.Dataset has no rows.")
    known = [unit.rows for unit in plan.units if unit.rows is not None]
    table = pa.table(
        {
            "packed_input": pa.array([unit.packed_input for unit in plan.units], pa.large_binary()),
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


def list_dataset_rows(title: str, dataset: ray.data.Dataset, *, shuffle: bool, changed: bool) -> Index:
    """The index of a Dataset's rows. ``title``: its name in messages; ``shuffle``: whether each epoch has an order of its own; ``changed``:
    whether a transform may change samples in place.

    Raises ConfigError if the pool cannot run the Dataset, or if only running it tells the number of its rows.
    """
    units = units_of(dataset, shuffle=shuffle)
    if isinstance(units, str):
        raise ConfigError(
            f"{title} takes a ray.data.Dataset that offload can execute itself, and {units}. materialize() the Dataset."
        )
    counts = units.table.column("rows").to_numpy()  # floats, if some are unknown
    if units.samples is None:
        unit = units.table.slice(int(np.flatnonzero(np.isnan(counts))[0]), 1).to_pylist()[0]
        raise ConfigError(
            f"{title} takes a ray.data.Dataset whose number of rows is known, and that of {unit['label']} ({units.chains[unit['chain']]}) "
            "is not. materialize() the Dataset; if a step returns as many rows as it gets, pass udf_modifying_row_count=False to "
            "map_batches."
        )
    counts = counts.astype(np.int64)
    rows = Runs(pa.table({"unit": np.arange(len(counts), dtype=np.int32)}), counts)
    return Index(
        name="ray.data.Dataset",
        rows=rows,
        reader=UnitReader(units.table, units.chains, changed=changed),
        groups=rows.groups,
        identity=units.identity,
    )


class UnitReader(Reader):
    """A reader of a Dataset's rows. It keeps the last unit that it made, since a task's rows come from few units.

    ``changed``: whether a transform may change samples in place.
    """

    def __init__(self, units: pa.Table, chains: Sequence[Chain], *, changed: bool) -> None:
        self.units, self.chains, self.changed = units, chains, changed
        self._maker: UnitMaker | None = None
        self._held: tuple[tuple[int, int, int], UnitSamples] | None = None
        self._seed = self._epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maker": None, "_held": None}

    def prepare(self) -> None:
        """Construct the classes of the Dataset's steps. Raises RunError for a class that raises."""
        self._maker = UnitMaker(self.chains)

    def begin_pass(self, seed: int, epoch: int) -> None:
        """Seed the random numbers of the Dataset's steps."""
        self._seed, self._epoch = seed, epoch

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        units = rows.column("unit").to_numpy()
        return gathered(units, rows.column("row").to_numpy(), self._unit, changed=self.changed)

    def describe(self, rows: pa.Table, row: int) -> str:
        label = self.units.column("label")[rows.column("unit")[row].as_py()].as_py()
        return f"row {rows.column('row')[row].as_py()} of {label}"

    def _unit(self, number: int) -> UnitSamples:
        """The samples of a unit, made now unless it was the last one made in this pass."""
        key = (number, self._seed, self._epoch)
        if self._held is None or self._held[0] != key:
            if self._maker is None:
                self.prepare()
            assert self._maker is not None
            unit = self.units.slice(number, 1).to_pylist()[0]
            # skip: as with other sources, the recipe decides whether a row may fail.
            self._held = key, self._maker.make(unit, number, seed=self._seed, epoch=self._epoch, skip=True)
        return self._held[1]
