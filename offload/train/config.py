"""What a user sets on a Trainer: frozen, keyword-only, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from offload.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """Batch sizes in samples. ``initial`` is the global batch M to begin with, ``max`` the largest that adaptation may
    choose, ``local`` the least and largest local batch m of one worker: a larger share is accumulated."""

    initial: int
    max: int | None = None
    local: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.initial < 1:
            raise ConfigError(f"the batch size must be ≥ 1, found {self.initial}; pass batch_size=64, say.")
        if self.max is not None and self.max < self.initial:
            raise ConfigError(
                f"the largest batch size must be ≥ the initial one ({self.initial}), found max={self.max}."
            )
        if self.local is not None and not 1 <= self.local[0] <= self.local[1]:
            raise ConfigError(f"local batch sizes must be a range ≥ 1, found {self.local}; pass local=(1, 256), say.")

    def split(self, workers: int) -> BatchSplit:
        """How the initial batch is cut for so many workers: ``M = K·m·(s + 1)``, rounded up to whole local batches."""
        share = math.ceil(self.initial / workers)
        accum_steps = 0
        if self.local is not None and share > self.local[1]:
            accum_steps = math.ceil(share / self.local[1]) - 1
        return BatchSplit(
            local_batch_size=math.ceil(share / (accum_steps + 1)), accum_steps=accum_steps, workers=workers
        )


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A global batch over workers: local batch size m, accumulation steps s, workers K."""

    local_batch_size: int
    accum_steps: int
    workers: int

    @property
    def global_batch_size(self) -> int:
        """``M = K·m·(s + 1)``."""
        return self.workers * self.local_batch_size * (self.accum_steps + 1)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are committed and how many stay. One is always committed at the end of an epoch (every
    ``every_epochs``), at the end of the run, and on Ctrl-C; ``every_s`` adds one, between two
    global batches, whenever so many seconds have passed since the last. ``keep`` are the newest to stay; with ``best`` (a
    reported metric) those that are best by ``mode``, and the newest."""

    every_epochs: int = 1
    every_s: float | None = None
    keep: int = 2
    best: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.every_epochs < 1:
            raise ConfigError(f"every_epochs must be ≥ 1, found {self.every_epochs}.")
        if self.keep < 1:
            raise ConfigError(f"at least one checkpoint must be kept, found keep={self.keep}.")
        if self.mode not in ("max", "min"):
            raise ConfigError(f'mode must be "max" or "min", found {self.mode!r}.')


def workers_range(workers: Any) -> tuple[int, int]:
    """``workers=4`` or ``workers=(1, 8)`` as (least, most)."""
    pair = (workers, workers) if isinstance(workers, int) else tuple(workers)
    if len(pair) != 2 or not all(isinstance(w, int) for w in pair) or not 1 <= pair[0] <= pair[1]:
        raise ConfigError(f"workers must be a number ≥ 1 or a range (least, most), found {workers!r}.")
    return pair[0], pair[1]
