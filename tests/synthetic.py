"""Synthetic truths to fit: random step times, random configurations, noisy measurements of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.model import StepTime


@dataclass(frozen=True)
class Points:
    """Configurations: nodes, workers, local batch sizes, accumulation steps."""

    nodes: Any
    workers: Any
    local: Any
    accum: Any

    @property
    def configurations(self) -> tuple[Any, Any, Any]:
        return self.nodes, self.workers, self.local


@dataclass(frozen=True)
class Truth:
    """A random model, and a generator of its own."""

    model: StepTime
    rng: np.random.Generator

    def points(self, count: int) -> Points:
        """Random ones: one node or several, up to 8 workers each, local batches from 8 to 256."""
        nodes = self.rng.choice([1, 1, 2, 4], size=count)
        workers = nodes * self.rng.choice([1, 2, 4, 8], size=count)
        return Points(nodes, workers, np.exp(self.rng.uniform(np.log(8), np.log(256), count)).round(), np.zeros(count))

    def points_between(self, seen: Points, count: int) -> Points:
        """Others in the regimes (one worker, one node, several) and ranges of workers and sizes that ``seen`` covers."""
        regime = np.select([seen.workers == 1, seen.nodes == 1], [0, 1], 2)
        chosen = self.rng.integers(0, len(regime), count)
        workers, nodes = np.ones(count, dtype=int), np.ones(count, dtype=int)
        for i, at in enumerate(chosen):
            same = regime == regime[at]
            workers[i] = self.rng.integers(seen.workers[same].min(), seen.workers[same].max() + 1)
            nodes[i] = min(seen.nodes[at], workers[i])
        local = self.rng.uniform(seen.local.min(), seen.local.max(), count).round()
        return Points(nodes, workers, local, self.rng.integers(0, 4, count))


def truths(count: int) -> Iterator[Truth]:
    """As many random truths, the same ones each time."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        beta = 10 ** rng.uniform(-4, -2)
        alpha = beta * rng.uniform(2, 60)
        sync = (alpha + beta * 64) * rng.uniform(0.05, 1.5)
        intra, inter = sync * rng.uniform(0.1, 1), sync
        model = StepTime(
            alpha, beta, intra, intra * rng.uniform(0, 0.1), inter, inter * rng.uniform(0, 0.1), rng.uniform(1, 8)
        )
        yield Truth(model, rng)


def measure(model: StepTime, points: Points, *, noise: float, rng: np.random.Generator) -> tuple[Any, Any]:
    """(compute times, last micro-batch times) with relative errors of ``noise``."""
    compute = np.asarray(model.compute_time_s(points.local)) * np.exp(rng.normal(0, noise, len(points.local)))
    last = np.asarray(model.predict(*points.configurations)) * np.exp(rng.normal(0, noise, len(points.local)))
    return compute, last
