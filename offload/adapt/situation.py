"""What a decision about the size of training knows, and the rules that bind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from offload.adapt.observe import Seen
from offload.model.batch_split import BatchSplit
from offload.model.noise import GradientNoise

Objective = Literal["time", "cost"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A worker count that fits, with the workers' nodes, the cores that then preprocess, and the dollars per hour of all nodes
    in use (None: unknown).

    ``elastic``: the cluster adds and removes cores as the run asks for them, up to ``cores``. The price of the option is then that of
    the workers' nodes, and ``usd_per_core`` that of each core beyond ``free_cores``.
    """

    workers: int
    nodes: int
    cores: float
    usd_per_hour: float | None = None
    elastic: bool = False
    usd_per_core: float = 0.0
    free_cores: float = 0.0

    def usd_with(self, cores: Any) -> Any:
        """Dollars per hour with so many cores, over arrays; the price must be known."""
        return (self.usd_per_hour or 0.0) + self.usd_per_core * np.maximum(cores - self.free_cores, 0.0)


@dataclass(frozen=True, kw_only=True)
class DecisionBounds:
    """The bounds of the decisions, and the rules that keep them steady.

    Args:
        initial_batch_size: M0.
        max_batch_size: the largest global batch; the initial one where batches are fixed.
        local_batch_size: the smallest and the largest batch of one worker.
        objective: ``time``: the most goodput; ``cost``: the most goodput per dollar.
        least_gain: the least relative gain that justifies another batch.
        least_resize_gain: the same for another worker count, which stops training for a while.
        indifferent: the share of the best goodput that fewer workers may lose: the run releases surplus workers.
        agreeing: consecutive intervals that must ask for the same worker count.
        overlap: delta of the joint model.
    """

    initial_batch_size: int
    max_batch_size: int
    local_batch_size: tuple[int, int]
    objective: Objective = "time"
    least_gain: float = 0.05
    least_resize_gain: float = 0.1
    indifferent: float = 0.03
    agreeing: int = 2
    overlap: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The input of a decision.

    Args:
        split: how the global batches are split now.
        seen: what the run has learned.
        noise: gradient noise; None if it is unknown, or the batch is fixed.
        options: worker counts that fit, including that of ``split`` if it still fits.
        work_left: initial-batch-equivalent samples still to train.
        restart_s: the cost of a change of the worker count, in seconds.
    """

    split: BatchSplit
    seen: Seen
    noise: GradientNoise | None
    options: Sequence[Option]
    work_left: float = math.inf
    restart_s: float = 0.0
