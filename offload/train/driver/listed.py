"""A data set of a run, after its source was listed."""

from __future__ import annotations

from dataclasses import dataclass

from offload.pipeline.feed import Stream
from offload.pipeline.pool import PackedRecipe
from offload.pipeline.sources.base import Index
from offload.pipeline.spec import Pipeline


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A data set whose source was listed (``index`` is None for a ``ray.data.Dataset``)."""

    name: str
    pipeline: Pipeline
    index: Index | None
    shuffle: bool

    def stream(self, seed: int) -> Stream:
        """The data set for the feed. Puts the recipe of its tasks into the object store."""
        return Stream(
            recipe=PackedRecipe.of(self.pipeline.recipe(self.index, seed=seed, dataset=self.name)),
            table=self.index.table if self.index is not None else None,
            groups=self.index.groups if self.index is not None else None,
            draws=self.index.draws if self.index is not None else None,
            dataset=self.pipeline.dataset,
            id_column=self.pipeline.id_column,
            shuffle=self.shuffle,
            seed=seed,
        )
