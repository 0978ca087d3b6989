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
    names, inverse = np.unique(groups, return_inverse=True)
    rank_of_group = rng.permutation(len(names))
    within = rng.permutation(n)
    return np.lexsort((within, rank_of_group[inverse])).astype(np.int64)


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
