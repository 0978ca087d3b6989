"""A ``ray.data.Dataset`` as an index of rows, for passes that pick samples one by one: mixed with other sources, or drawn by weight.

A sample is a unit's number and its row, so the number of rows of each unit must be known. Where it stops: passes over a Dataset alone need
no such numbers (:mod:`offload.pipeline.sources.units`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from offload.errors import ConfigError
from offload.pipeline.index_rows import Runs
from offload.pipeline.sources.base import At, Index, Samples, nowhere
from offload.pipeline.sources.ray_dataset import units_of
from offload.pipeline.sources.unit_maker import Made, UnitMaker, gathered

if TYPE_CHECKING:
    import ray.data

    from offload.pipeline.ray_plan import Chain


def list_dataset_rows(what: str, dataset: ray.data.Dataset, *, shuffle: bool, changed: bool) -> Index:
    """The index of a Dataset's rows. ``what``: its name in messages; ``shuffle``: whether each epoch has an order of its own; ``changed``:
    whether a transform may change samples in place.

    Raises ConfigError if the pool cannot run the Dataset, or if only running it tells the number of its rows.
    """
    units = units_of(dataset, shuffle=shuffle)
    if isinstance(units, str):
        raise ConfigError(
            f"{what} takes a ray.data.Dataset that offload can execute itself, and {units}. materialize() the Dataset."
        )
    counts = units.table.column("rows").to_numpy()  # floats, if some are unknown
    if units.samples is None:
        unit = units.table.slice(int(np.flatnonzero(np.isnan(counts))[0]), 1).to_pylist()[0]
        raise ConfigError(
            f"{what} takes a ray.data.Dataset whose number of rows is known, and that of {unit['label']} ({units.chains[unit['chain']]}) "
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


class UnitReader:
    """A reader of a Dataset's rows. It keeps the last unit that it made, since a task's rows come from few of them. ``changed``: a
    transform may change samples in place."""

    def __init__(self, units: pa.Table, chains: Sequence[Chain], *, changed: bool) -> None:
        self.units, self.chains, self.changed = units, chains, changed
        self._maker: UnitMaker | None = None
        self._held: tuple[tuple[int, int, int], Made] | None = None
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
        return gathered(units, rows.column("row").to_numpy(), self._made, changed=self.changed)

    def describe(self, rows: pa.Table, row: int) -> str:
        label = self.units.column("label")[rows.column("unit")[row].as_py()].as_py()
        return f"row {rows.column('row')[row].as_py()} of {label}"

    def _made(self, number: int) -> Made:
        key = (number, self._seed, self._epoch)
        if self._held is None or self._held[0] != key:
            if self._maker is None:
                self.prepare()
            assert self._maker is not None
            unit = self.units.slice(number, 1).to_pylist()[0]
            # Whether a row may fail is up to the recipe, as with other sources.
            self._held = key, self._maker.make(unit, number, seed=self._seed, epoch=self._epoch, skip=True)
        return self._held[1]
