"""Steps that wait for batches: two stations with room for some batches between them, event by event.

The input makes global batches one after another, and stops where the room is full. The workers take one as soon as it is ready and the
last step is over, and all wait for the slowest. Each event is the largest of two others plus a time, so the recursion below is the
discrete-event simulation itself, for many ratios of the two rates at once.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import scipy.special

from benchmarks.simulator.job import Floats

STEPS, WARM_SHARE, REPLICATES = 400, 0.2, 8
RATIOS = np.concatenate([[0.0], np.geomspace(0.2, 5.0, 33)])
"""Seconds that the input takes for a batch over those of a step: the grid of :func:`step_over_longer`."""


def batches(wait_s: Floats, step_s: Floats, room: int) -> tuple[Floats, Floats]:
    """When batches are ready and when their steps end, in seconds.

    Args:
        wait_s: the time in which the input makes each batch, of shape (batches, ...).
        step_s: the time of each step, of the same shape.
        room: batches that may be ready or under way beside the one that trains, at least 1.
    """
    ready, ended = np.empty_like(wait_s), np.empty_like(step_s)
    taken = np.zeros_like(step_s)
    for i in range(len(wait_s)):
        made_before = ready[i - 1] if i else np.zeros(wait_s.shape[1:])
        room_since = taken[i - room] if i >= room else np.zeros(wait_s.shape[1:])
        ready[i] = np.maximum(made_before, room_since) + wait_s[i]
        taken[i] = np.maximum(ready[i], ended[i - 1] if i else 0.0)
        ended[i] = taken[i] + step_s[i]
    return ready, ended


@functools.lru_cache(maxsize=512)
def _table(workers: int, step_variation: float, input_variation: float, room: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    shape = (STEPS, REPLICATES, 1)
    step = slowest_of(workers, step_variation, rng.random(shape))
    step = step / step.mean()
    sigma = math.sqrt(math.log1p(input_variation**2))
    wait = np.exp(sigma * rng.standard_normal(shape))
    wait = wait / wait.mean()
    longer = np.maximum(RATIOS, 1.0)
    _, ended = batches(wait * (RATIOS / longer), step / longer, room)
    first = int(WARM_SHARE * STEPS)
    return np.asarray((ended[-1] - ended[first - 1]).mean(axis=0) / (STEPS - first))


def step_over_longer(
    ratio: Floats, *, workers: int, step_variation: float, input_variation: float, room: int, seed: int = 0
) -> Floats:
    """The mean time between steps over the longer of the two sides' own times, at these ratios of the input's to the step's.

    Both stations scale with time, so the ratio alone matters; between the grid's ratios, it is interpolated.
    """
    table = _table(workers, round(step_variation, 3), round(input_variation, 3), room, seed)
    finite = np.clip(ratio, RATIOS[0], RATIOS[-1])
    return np.asarray(np.interp(finite, RATIOS, table))


def slowest_of(workers: int, variation: float, uniform: Floats) -> Floats:
    """The time of the slowest of these workers over the mean of one, from uniform random numbers: exact for log-normal times."""
    sigma = math.sqrt(math.log1p(variation**2))
    normal = scipy.special.ndtri(np.clip(uniform, 1e-12, 1 - 1e-12) ** (1 / max(workers, 1)))
    return np.asarray(np.exp(sigma * normal - sigma**2 / 2))
