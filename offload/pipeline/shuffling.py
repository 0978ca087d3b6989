"""The order of a pass and the random numbers of its augmentation, both functions of (seed, epoch) alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_MASK = (1 << 64) - 1


def epoch_permutation(
    n: int, *, seed: int, epoch: int, shuffle: bool = True, groups: NDArray[np.int64] | None = None
) -> Ids:
    """The sample ids of one pass in the order of their delivery: a permutation of ``range(n)``.

    ``groups`` gives, for each sample, the unit that storage reads at once (a row group, a shard). The groups then come in random
    order, and the samples within a group too, so that every group is read once.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    rng = generator(seed, epoch)
    if groups is None:
        return rng.permutation(n).astype(np.int64)
    return shuffled_groups(np.arange(n, dtype=np.int64), groups, rng)


def shuffled_groups(ids: Ids, groups: NDArray[np.int64], rng: np.random.Generator) -> Ids:
    """Ids in random order, those of a group together. ``groups``: the group of each.

    It shuffles one group after the other, within the core's cache: for millions of ids that is several times faster than sorting them.
    """
    if np.any(np.diff(groups) < 0):
        by_group = np.argsort(groups, kind="stable")
        ids, groups = ids[by_group], groups[by_group]
    parts = np.split(ids, np.flatnonzero(np.diff(groups)) + 1)
    return np.concatenate([rng.permutation(parts[i]) for i in rng.permutation(len(parts)).tolist()])


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers of a pass's order."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)))


def mix(*parts: int) -> int:
    """A 63-bit seed from several integers; each bit depends on every part (splitmix64's finaliser)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
