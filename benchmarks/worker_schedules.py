"""Schedules of worker counts, and the emulated time that training takes under them.

The schedules are those of Uber's article on elastic Horovod: ResNet-50 on CIFAR-10, 90 epochs, 2 to 8 GPUs, a change every 60 or 180
seconds, or a doubling every 30 epochs. Here an epoch of eight workers takes about half of such an interval.

Workers share this machine's cores, so their time is not measured but emulated: a step costs what the largest local batch would cost on a
device of its own, and the exchange of gradients, by the model of :mod:`offload.model.step_time`. A change of the worker count costs a
restart. Nothing here has a clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from offload.model.step_time import StepTime

LEAST, MOST = 2, 8
INTERVAL_S = 60.0
Name = Literal["8 fixed", "±1 each interval", "±3 each third interval", "2 → 4 → 8", "2 fixed"]
NAMES: tuple[Name, ...] = ("8 fixed", "±1 each interval", "±3 each third interval", "2 → 4 → 8", "2 fixed")

ACCELERATOR = StepTime(
    alpha_compute=0.2,
    beta_compute=0.15,
    alpha_intra=0.5,
    beta_intra=0.05,
    alpha_inter=0.5,
    beta_inter=0.05,
    gamma=2.0,
)
"""The paced accelerators: a slow device, so that few images take as long as the article's many."""


@dataclass(frozen=True)
class Change:
    """The next change of the worker count: after a step at which ``seconds`` have passed, or ``epochs`` are complete."""

    workers: int
    seconds: float = math.inf
    epochs: float = math.inf

    def due(self, seconds: float, epochs: float) -> bool:
        """Return whether the change is due."""
        return seconds >= self.seconds or epochs >= self.epochs


class Schedule:
    """The worker counts of one run.

    Args:
        name: the name of the schedule.
        seed: the seed of its random directions.
        epochs: the epochs of the run.
    """

    def __init__(self, name: Name, seed: int, epochs: int) -> None:
        self.name, self._epochs = name, epochs
        self._random = random.Random(f"{name} {seed}")
        self.first = LEAST if name in ("2 → 4 → 8", "2 fixed") else MOST

    def next_change(self, workers: int, seconds: float) -> Change | None:
        """The next change of ``workers`` workers after so many seconds; None if there is none."""
        if self.name == "2 → 4 → 8":
            doublings = round(math.log2(workers / LEAST))
            if workers >= MOST:
                return None
            return Change(2 * workers, epochs=(doublings + 1) * self._epochs / 3)
        if self.name not in ("±1 each interval", "±3 each third interval"):
            return None
        by, interval_s = (1, INTERVAL_S) if self.name == "±1 each interval" else (3, 3 * INTERVAL_S)
        # At a bound only one direction is left; elsewhere both are equally likely.
        up = workers <= LEAST or (workers < MOST and self._random.random() < 0.5)
        wanted = min(max(workers + (by if up else -by), LEAST), MOST)
        return Change(wanted, seconds=(math.floor(seconds / interval_s) + 1) * interval_s)


def step_s(workers: int, local_batch_size: int) -> float:
    """Emulated seconds of a step whose largest local batch is this, each worker on a node of its own."""
    return float(ACCELERATOR.predict(workers, workers, local_batch_size, 0))


@dataclass
class Ledger:
    """What a run has spent, and what it did with the samples.

    Attributes:
        seconds: emulated seconds.
        steps: steps that the final weights contain.
        resizes: changes of the worker count.
        lost: samples of complete epochs that no step of the final weights contains.
        repeated: further steps on a sample within an epoch.
        undone: steps that a restart threw away.
    """

    seconds: float = 0.0
    steps: int = 0
    resizes: int = 0
    lost: int = 0
    repeated: int = 0
    undone: int = 0

    def count(self, trained: list[int], samples: int) -> None:
        """Count the samples of a complete epoch from the ids that its steps trained."""
        distinct = len(set(trained))
        self.lost += samples - distinct
        self.repeated += len(trained) - distinct
