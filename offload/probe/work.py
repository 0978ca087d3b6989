"""The preprocessing of some of a data set's samples, which this process can repeat with the same random numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset

from offload.loader.batch_recipe import BatchOrder, MapRecipe
from offload.loader.probing import LoaderSource
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.packing import unpack
from offload.pipeline.blocks.wire import HIDDEN, POSITION, SAMPLE_ID
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.watchdog import NoReports, Watch

SAMPLES = 64


class SampleWork(Protocol):
    """The preprocessing of ``samples`` samples."""

    @property
    def samples(self) -> int:
        """The number of samples."""

    def make(self, start: int, count: int) -> Any:
        """Preprocess ``count`` samples from number ``start`` on. A second call draws the same random numbers."""


@dataclass(frozen=True)
class RowWork:
    """The work of a training's data set: a recipe that is ready in this process, and index rows."""

    recipe: Recipe
    rows: pa.Table

    @property
    def samples(self) -> int:
        return int(self.rows.num_rows)

    def make(self, start: int, count: int) -> Any:
        rows = self.rows.slice(start, count)
        ids = pa.array(np.arange(start, start + rows.num_rows, dtype=np.int64))
        block = process(self.recipe, rows.append_column(SAMPLE_ID, ids).append_column(POSITION, ids), epoch=0)
        return {name: column for name, column in wire.decode(block).items() if name not in (SAMPLE_ID, *HIDDEN)}


@dataclass(frozen=True)
class LoaderWork:
    """The work of a loader's map-style data set. ``indices``: some of its sampler's, in batches or one by one."""

    recipe: MapRecipe
    indices: tuple[Any, ...]
    scratch: Scratch = field(default_factory=Scratch)

    @classmethod
    def of(cls, source: LoaderSource) -> LoaderWork | None:
        """The work of the first samples that the loader's sampler gives now; None for an iterable data set."""
        if isinstance(source.dataset, IterableDataset):
            return None
        recipe = MapRecipe(
            dataset=source.dataset, collate_fn=source.collate_fn, batches=source.batch_sampler is not None
        )
        indices = (
            source.sampler if source.batch_sampler is None else itertools.chain.from_iterable(source.batch_sampler)
        )
        return cls(recipe.ready(), tuple(itertools.islice(indices, SAMPLES)))

    @property
    def samples(self) -> int:
        return len(self.indices)

    def make(self, start: int, count: int) -> Any:
        chosen = self.indices[start : start + count]
        groups = [list(chosen)] if self.recipe.batches else list(chosen)
        orders = [
            BatchOrder(number=n, batch=n, indices=group, first=start + n, seed=0) for n, group in enumerate(groups)
        ]
        block = self.recipe.process(orders, epoch=0, scratch=self.scratch, watch=Watch(NoReports()))
        batches = [unpack(item) for item in block.items]
        for batch in batches:
            if isinstance(batch, ExceptionWrapper):
                batch.reraise()  # type: ignore[no-untyped-call]
        return batches
