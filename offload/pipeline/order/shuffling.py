"""The order of a pass and the random numbers of its augmentation, both functions of (seed, epoch) alone.

A pass visits each sample once, in shuffled order, or draws samples by weight with replacement (:class:`Draws`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]

_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Consecutive:
    """The groups of samples whose groups follow one another.

    It reads like an array of one number per sample, in the space of one number per group. ``counts``: the samples of each group.
    """

    counts: NDArray[np.int64]

    def __getitem__(self, ids: Ids) -> NDArray[np.int64]:
        """The groups of these samples."""
        return np.searchsorted(np.cumsum(self.counts), ids, side="right").astype(np.int64)

    def tolist(self) -> list[int]:
        """The group of each sample."""
        numbers: list[int] = self.each().tolist()
        return numbers

    def each(self) -> NDArray[np.int64]:
        """The group of each sample, as an array."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)


Groups = NDArray[np.int64] | Consecutive


def epoch_permutation(n: int, *, seed: int, epoch: int, shuffle: bool = True, groups: Groups | None = None) -> Ids:
    """The sample ids of one pass in the order of their delivery: a permutation of ``range(n)``.

    Ids take four bytes each as long as ``n`` allows it.

    ``groups`` gives, for each sample, the unit that storage reads at once (a row group, a shard). The groups then come in random
    order, and the samples within a group too, so that every group is read once.
    """
    # The order of a billion samples is 4 GB, which the hub holds for each pass.
    kind = np.dtype(np.uint32 if n <= 2**32 else np.int64)
    if not shuffle:
        return np.arange(n, dtype=kind)
    rng = generator(seed, epoch)
    if isinstance(groups, Consecutive):
        return _shuffled_runs(n, kind, groups.counts[groups.counts > 0], rng)
    ids = np.arange(n, dtype=kind)
    if groups is not None:
        return shuffled_groups(ids, groups, rng)
    rng.shuffle(ids)
    return ids


def _shuffled_runs(n: int, kind: np.dtype[Any], counts: NDArray[np.int64], rng: np.random.Generator) -> Ids:
    """The result of :func:`shuffled_groups` for consecutive groups, without another array of all samples."""
    ids: Ids = np.empty(n, kind)
    stops = np.cumsum(counts)
    at = 0
    for group in rng.permutation(len(counts)).tolist():
        part = ids[at : at + counts[group]]
        part[:] = np.arange(stops[group] - counts[group], stops[group], dtype=kind)
        rng.shuffle(part)
        at += len(part)
    return ids


def shuffled_groups(ids: Ids, groups: NDArray[np.int64], rng: np.random.Generator) -> Ids:
    """These ids in random order, those of a group together. ``groups``: the group of each.

    It shuffles one group after the other, within the core's cache: for millions of ids that is several times faster than sorting them.
    """
    # Most listings are in the order of their groups already, and need no sort. A stable one keeps equal orders in
    # every run.
    if np.any(np.diff(groups) < 0):
        by_group = np.argsort(groups, kind="stable")
        ids, groups = ids[by_group], groups[by_group]
    parts = np.split(ids, np.flatnonzero(np.diff(groups)) + 1)
    return np.concatenate([rng.permutation(parts[i]) for i in rng.permutation(len(parts)).tolist()])


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers of a pass's order."""
    # Philox, a counter-based generator: any two keys give independent streams, so (seed, epoch) needs no mixing.
    return np.random.Generator(np.random.Philox(key=np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)))


def pass_number(name: str, epoch: int, number: int) -> int:
    """The number that stands for the epoch in a pass over another data set than the training data.

    ``number`` counts the data set's passes within the epoch.

    Each pass gets an order and random numbers of its own. Two data sets of one size get different orders: otherwise a loop over both would
    pair the same samples in every epoch.
    """
    return mix(zlib.crc32(name.encode()), epoch, number)


def mix(*parts: int) -> int:
    """A 63-bit seed from several integers; each bit depends on every part (splitmix64's finaliser)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    # 63 bits: int64 holds it, and it is never negative.
    return state >> 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Draws:
    """``number`` draws, each of sample ``i`` with a probability in proportion to ``weights[i]``, whatever was drawn before.

    The weights are finite, not negative, and not all zero. A draw counts by its position in the pass.
    """

    weights: NDArray[np.float64]
    number: int

    def order(self, *, seed: int, epoch: int, groups: Groups | None = None) -> Ids:
        """The sample ids of one pass, a function of the seed and the epoch.

        ``groups`` are as in :func:`offload.pipeline.order.shuffling.epoch_permutation`: the draws of a group come together, so that
        storage reads every group once.
        """
        rng = generator(seed, epoch)
        # Divided first: the sum of very large weights would overflow.
        bounds = np.cumsum(self.weights / self.weights.max())
        # A sample of weight 0 has an empty interval, which side="right" never returns. Rounding may exceed the last bound.
        drawn = np.searchsorted(bounds, rng.random(self.number) * bounds[-1], side="right")
        ids: Ids = np.minimum(drawn, np.flatnonzero(self.weights)[-1]).astype(np.int64)
        if groups is None:
            return ids
        return shuffled_groups(ids, groups[ids], rng)
