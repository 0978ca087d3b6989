"""Weighted draws with replacement, the order of a pass that visits some samples often and others never."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.pipeline.shuffling import Groups, Ids, generator, shuffled_groups


@dataclass(frozen=True, kw_only=True, eq=False)
class Draws:
    """``number`` draws, each of sample ``i`` with a probability in proportion to ``weights[i]``, whatever was drawn before.

    The weights are finite, not negative, and not all zero. A draw counts by its position in the pass.
    """

    weights: NDArray[np.float64]
    number: int

    def order(self, *, seed: int, epoch: int, groups: Groups | None = None) -> Ids:
        """The sample ids of one pass, a function of the seed and the epoch.

        ``groups`` are as in :func:`offload.pipeline.shuffling.epoch_permutation`: the draws of a group come together, so that
        storage reads every group once.
        """
        rng = generator(seed, epoch)
        bounds = np.cumsum(self.weights / self.weights.max())
        # A sample of weight 0 has an empty interval, which "right" never finds.
        found = np.searchsorted(bounds, rng.random(self.number) * bounds[-1], side="right")
        ids: Ids = np.minimum(found, np.flatnonzero(self.weights)[-1]).astype(np.int64)
        if groups is None:
            return ids
        return shuffled_groups(ids, groups[ids], rng)
