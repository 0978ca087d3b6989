"""A data set of a run, after its source was listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.feed.datasets import FeedDataset
from offload.pipeline.index.rows import close_rows
from offload.pipeline.index.source import Index
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.preprocessing.shared_samples import SharedRecipe, Sharing
from offload.pipeline.raydata.units import UnitIndex, UnitRecipe
from offload.report.events import ClassesDiffer
from offload.train.messages import TRAIN


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A data set whose source was listed: an ``index``, the ``units`` of a ``ray.data.Dataset``, or neither if Ray Data executes one.

    ``notes`` are for the user. ``setup``: the user's function that sets up each preprocessing process. ``sharing``: where other runs find
    its samples; None: nowhere.
    """

    name: str
    pipeline: Pipeline
    index: Index | None
    shuffle: bool
    units: UnitIndex | None = None
    notes: tuple[str, ...] = ()
    setup: Callable[[], object] | None = None
    sharing: Sharing | None = None

    @property
    def samples(self) -> int | None:
        """The number of samples of a pass; None if it is unknown."""
        if self.units is not None:
            return self.units.samples
        return None if self.index is None else len(self.index)

    @property
    def identity(self) -> str | None:
        """A text that differs for another data set of the same size, or for another kind of order; None if nothing is known."""
        # A shuffled order depends on the seed and the epoch alone, which a checkpoint holds. Only other orders need a
        # name.
        order = None
        if self.drawn:
            order = "drawn by weight"
        elif self.pooled and not self.shuffle:
            order = "not shuffled"
        known: UnitIndex | Index | None = self.index if self.units is None else self.units
        return ", ".join(filter(None, (None if known is None else known.identity, order))) or None

    @property
    def varied(self) -> bool:
        """Whether each pass has an order of its own."""
        return self.shuffle or self.drawn

    @property
    def drawn(self) -> bool:
        """Whether a pass draws its samples by weight."""
        return self.index is not None and self.index.draws is not None

    @property
    def pooled(self) -> bool:
        """Whether offload's own processes preprocess its samples; otherwise, Ray Data does."""
        return self.index is not None or self.units is not None

    @property
    def shared(self) -> bool:
        """Whether other runs find its samples."""
        return self.sharing is not None and self.index is not None and not self.pipeline.yields

    @property
    def resumable(self) -> bool:
        """Whether samples have stable ids, so that a pass can go on where it stopped."""
        return self.pooled or self.pipeline.id_column is not None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if the source knows them."""
        return () if self.index is None else self.index.classes

    def close(self) -> None:
        """Remove the files that the listing keeps for this run alone."""
        if self.index is not None:
            close_rows(self.index.rows)

    def recipe(self, seed: int) -> Any:
        """The recipe of its tasks."""
        inner = replace(self.pipeline.recipe(self.index, seed=seed, dataset=self.name), setup=self.setup)
        if self.units is None:
            return inner
        return UnitRecipe(
            inner=inner,
            chains=self.units.chains,
            ids=self.units.ids,
            shuffle=self.shuffle,
            id_column=self.pipeline.id_column,
        )

    def stream(self, seed: int, put: Callable[[Any], Any]) -> FeedDataset:
        """The data set for the feed. ``put``: stores the recipe of its tasks where the processes find it."""
        recipe, sharing = self.recipe(seed), self.sharing if self.shared else None
        if sharing is not None:
            recipe = SharedRecipe.of(recipe, sharing)
        stream = FeedDataset(
            recipe=PackedRecipe.of(recipe, put=put),
            shuffle=self.shuffle,
            seed=seed,
            id_column=self.pipeline.id_column,
            shared=sharing is not None,
        )
        if self.index is not None:
            return replace(stream, rows=self.index.rows, groups=self.index.groups, draws=self.index.draws)
        if self.units is not None:
            return replace(stream, units=self.units.table, unit_samples=self.units.samples)
        return replace(stream, dataset=self.pipeline.dataset)


def classes_that_differ(listed: Mapping[str, Listed]) -> list[ClassesDiffer]:
    """For each data set in which a label means another class than in the one for training, the first such label."""
    trained = listed[TRAIN].classes
    mismatches = []
    for name, dataset in listed.items():
        for label, is_here in enumerate(dataset.classes if trained else ()):
            is_there = trained[label] if label < len(trained) else None
            if is_here != is_there:
                mismatches.append(ClassesDiffer(dataset=name, label=label, is_here=is_here, is_there=is_there))
                break
    return mismatches
