"""The split of a global batch over workers, and into micro-batches whose gradients each worker accumulates."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A global batch over workers: local batch size m, accumulation steps s, workers K."""

    workers: int
    local_batch_size: int
    accum_steps: int

    @classmethod
    def of(cls, global_batch_size: int, workers: int, largest_local: int | None = None) -> BatchSplit:
        """Cut a global batch, rounded up to whole local batches. A worker accumulates a share above ``largest_local``."""
        # Up, not down: fewer samples than the initial batch would lie outside of what the gain is defined for.
        share = math.ceil(global_batch_size / workers)
        accum_steps = 0 if largest_local is None else max(math.ceil(share / largest_local) - 1, 0)
        return cls(workers=workers, local_batch_size=math.ceil(share / (accum_steps + 1)), accum_steps=accum_steps)

    @property
    def global_batch_size(self) -> int:
        """``M = K·m·(s + 1)``."""
        return self.workers * self.local_batch_size * (self.accum_steps + 1)

    def with_local_at_most(self, most: int | None) -> BatchSplit:
        """Cut the same global batch, or one a few samples larger, into local batches of at most ``most``.

        Uses up to twice as many micro-batches as needed if that keeps the global batch unchanged.
        """
        if most is None or self.local_batch_size <= most:
            return self
        share = self.local_batch_size * (self.accum_steps + 1)
        least = math.ceil(share / most)
        micro_batches = next((n for n in range(least, 2 * least + 1) if share % n == 0), least)
        return BatchSplit(
            workers=self.workers, local_batch_size=math.ceil(share / micro_batches), accum_steps=micro_batches - 1
        )
