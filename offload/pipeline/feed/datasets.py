"""What a feed needs: the data sets of a run, and the cores that preprocess."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from offload.pipeline.index.rows import IndexRows
from offload.pipeline.order.shuffling import Draws, Groups, Ids, epoch_permutation

if TYPE_CHECKING:
    import ray.data

    from offload.pipeline.pool.packed_recipe import PackedRecipe


@dataclass(frozen=True, kw_only=True)
class FeedDataset:
    """A data set of the run, ready to feed: an index (``rows``, ``groups`` and ``draws`` of its source), ``units`` (the table of a
    :class:`offload.pipeline.raydata.units.UnitIndex`, with ``unit_samples`` if their sum is known), or a ``dataset``.

    Unpickling it does not import the libraries of the transforms, which stay packed in ``recipe``. ``shared``: whether other runs may have
    made its samples.
    """

    recipe: PackedRecipe
    rows: IndexRows | None = None
    groups: Groups | None = None
    draws: Draws | None = None
    units: pa.Table | None = None
    unit_samples: int | None = None
    dataset: ray.data.Dataset | None = None
    id_column: str | None = None
    shuffle: bool = False
    seed: int = 0
    shared: bool = False

    @property
    def samples(self) -> int | None:
        """The number of samples of a pass; None if it is unknown."""
        if self.rows is None:
            return self.unit_samples
        return len(self.rows) if self.draws is None else self.draws.number

    @property
    def pooled(self) -> bool:
        """Whether the pool makes its blocks; otherwise, Ray Data does."""
        return self.dataset is None

    def order(self, epoch: int) -> Ids:
        """The sample ids of a pass over an index, one for each position; the numbers of its units in a pass over units."""
        if self.units is not None:
            # Units of one source are a group: shuffling reorders the sources, and the units within each, as it does
            # with files.
            sources = self.units.column("source").to_numpy()
            return epoch_permutation(len(self.units), seed=self.seed, epoch=epoch, shuffle=self.shuffle, groups=sources)
        if self.draws is not None:
            return self.draws.order(seed=self.seed, epoch=epoch, groups=self.groups)
        assert self.rows is not None
        return epoch_permutation(len(self.rows), seed=self.seed, epoch=epoch, shuffle=self.shuffle, groups=self.groups)


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The resources of preprocessing: the node of each core, the CPUs that Ray counts for one core, and each node's object store
    in bytes. ``runtime_env`` is Ray's runtime environment for its processes."""

    nodes: tuple[str, ...]
    task_cpus: float
    stores: Mapping[str, float]
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store_bytes(self) -> float:
        """The size of the cluster's object store."""
        return sum(self.stores.values())

    @functools.cached_property
    def by_node(self) -> Counter[str]:
        """The number of cores on each node."""
        return Counter(self.nodes)

    def have_room(self, held: Counter[str], node: str, share: float) -> bool:
        """Return whether a block of this node may follow those that nobody has taken yet, ``held`` bytes by node: they may fill this share
        of the cluster's object store, and of the node's own."""
        own_bytes = self.stores.get(node, math.inf)
        # Both limits count: a node whose own store is full spills to disk, however much room the other nodes have.
        return held.total() < share * self.store_bytes and held[node] < share * own_bytes

    @property
    def cores(self) -> int:
        """How many."""
        return len(self.nodes)
