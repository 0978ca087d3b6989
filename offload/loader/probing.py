"""A program under the probe: one of its DataLoaders is first drained, then yields the same batches again and again.

The probe runs the program as it is. When the program iterates over the chosen loader, its loop measures itself: the time from a replayed
batch to the request for the next one is its step. The program ends inside its loop, with an exception that ``except Exception`` does not
catch.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.loader.in_program import InProgram
from offload.loader.iterator import Iteration
from offload.pipeline.blocks.tensors import bytes_of

REPLAYED = 4  # batches to replay
REPLAYED_BYTES = 1 << 30
WARM_STEPS = 3
LEAST_STEPS = 3
DRAIN_S, REPLAY_S = 15.0, 20.0


class ProbedError(BaseException):
    """The probe has measured enough, and the program ends."""


class LoaderSource(NamedTuple):
    """The source of a loader, without the loader itself, whose end gives the cluster's cores back."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    sampler: Any
    batch_sampler: Any


@dataclass(kw_only=True)
class LoaderProbe:
    """The measurement of the loader in the variable ``name``.

    Args:
        tell: called with the phase and the share that is done.
        drain_s, replay_s: how long to drain the loader, and how long to replay batches.
        costs: core-seconds and bytes per sample of recent tasks.
        step_s: the median step in seconds. 0: not measured yet.
        samples: the samples of a batch.
        beside_cpus: the cores that the program used while it stepped.
        measuring_s: the length of the measurement.
        seen: the variables of loaders that the program iterated over.
        unnamed: whether the program iterated over a loader that no variable holds.
        source: the source of the measured loader.
    """

    name: str
    tell: Callable[[str, float], None]
    drain_s: float
    replay_s: float
    costs: list[tuple[float, float]] = field(default_factory=list)
    step_s: float = 0.0
    samples: int = 0
    beside_cpus: float = 0.0
    measuring_s: float = 0.0
    seen: set[str] = field(default_factory=set)
    unnamed: bool = False
    source: LoaderSource | None = None

    def wants(self, loader: torch.utils.data.DataLoader[Any]) -> bool:
        """Return whether to measure this loader. Raises ProbedError once the measurement is complete."""
        if self.step_s:
            raise ProbedError
        names = set(_names_of(loader))
        self.seen |= names
        self.unnamed = self.unnamed or not names
        if self.name not in names:
            return False
        self.source = LoaderSource(loader.dataset, loader.collate_fn, loader.sampler, loader.batch_sampler)
        return True

    @property
    def iterated(self) -> str:
        """A sentence about the loaders that the program iterated over."""
        if self.unnamed:
            named = f" {', '.join(sorted(self.seen))} and" if self.seen else ""
            return (
                f"It iterated over{named} a loader that no variable holds, but an attribute, a list or a dict. Give it a variable before "
                "the loop: loader = self.loader."
            )
        return f"It iterated over {', '.join(sorted(self.seen)) or 'none'}."

    def measure(self, iteration: Iteration | InProgram) -> Iterator[Any]:
        """Yield batches of the iteration, and measure the steps between them. Raises ProbedError at the end.

        If the program leaves its loop earlier, its steps are the measurement, if there are enough.
        """
        began = time.monotonic()
        batches = self._drain(iteration)
        iteration.close()
        if not batches:
            return
        steps: list[float] = []
        until = time.monotonic() + self.replay_s
        cpu, wall = 0.0, 0.0
        try:
            for number in itertools.count():
                left = until - time.monotonic()
                if left <= 0 and len(steps) >= LEAST_STEPS:
                    break
                self.tell("replaying batches", 0.5 + 0.5 * min(1 - left / self.replay_s, 1.0))
                at, cpu_at = time.perf_counter(), time.process_time()
                yield _fresh(batches[number % len(batches)])
                _synchronise()
                if number >= WARM_STEPS or left <= 0:
                    steps.append(time.perf_counter() - at)
                    cpu, wall = cpu + time.process_time() - cpu_at, wall + steps[-1]
        finally:  # also when the program leaves its loop, such as after a number of batches
            if len(steps) >= LEAST_STEPS:
                self.step_s = statistics.median(steps)
                self.beside_cpus = cpu / wall
                self.measuring_s = time.monotonic() - began
        raise ProbedError

    def _drain(self, iteration: Iteration | InProgram) -> list[Any]:
        batches: list[Any] = []
        began = time.monotonic()
        for batch, samples in iteration.with_samples():
            if len(batches) < REPLAYED and len(batches) * bytes_of(batch) < REPLAYED_BYTES:
                batches.append(batch)
                self.samples = max(self.samples, samples)
            self.tell("draining the input", 0.5 * min((time.monotonic() - began) / self.drain_s, 1.0))
            if time.monotonic() - began > self.drain_s:
                break
        self.costs = iteration.costs() or self.costs
        return batches


active: LoaderProbe | None = None
"""The probe under which this process runs its program, if any."""


def _names_of(loader: object) -> Iterator[str]:
    """The names of the variables that hold this loader, in the functions that are iterating over it."""
    frame = sys._getframe(2)
    while frame is not None:
        for scope in (frame.f_locals, frame.f_globals):
            yield from (name for name, value in list(scope.items()) if value is loader and name != "self")
        frame = frame.f_back  # type: ignore[assignment]


def _fresh(batch: Any) -> Any:
    """The same tensors in containers of their own, which the program may change."""
    if type(batch) is dict:
        return {name: _fresh(value) for name, value in batch.items()}
    return [_fresh(value) for value in batch] if type(batch) is list else batch


def _synchronise() -> None:
    """Wait for the accelerator: the program's step only queues its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
