"""The measurements of a DataLoader: how fast batches come, how long the program waits for them, and how fast they could come."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from offload.formatting import rate_shown
from offload.measure.steps import INPUT_BOUND


class MadeRates(NamedTuple):
    """The measurements of an iteration where its batches are made: ``cores``, and its rates as in
    :meth:`offload.pipeline.feed.meter.Meter.summary`; core-seconds and bytes per sample of its recent tasks."""

    rates: Mapping[str, float]
    costs: list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """The measurements since the loader was made, or since the last ``reset_stats()``.

    Args:
        batches: batches that the program got.
        samples_per_s: samples/s within epochs, from the first batch to the last.
        stall: the share of that time in which the program waited for a batch, from 0 to 1.
        cores: cores that preprocess, shared by all loaders of the job.
        input_ceiling_samples_per_s: samples/s that these cores could make; 0 before the first measurement.
        core_seconds_per_sample: the CPU time of a sample; 0 before the first measurement.
        bytes_per_sample: the size of a sample in a batch; 0 before the first measurement.
    """

    batches: int
    samples_per_s: float
    stall: float
    cores: int
    input_ceiling_samples_per_s: float
    core_seconds_per_sample: float
    bytes_per_sample: float

    @property
    def verdict(self) -> str:
        """The measurements in a sentence."""
        if not self.batches:
            return "no batch was read yet"
        if self.stall < INPUT_BOUND:
            return f"the input keeps up: the program waited {self.stall:.1%} of its time"
        said = f"the input holds the program up: it waited {self.stall:.0%} of its time for {_cores(self.cores)}"
        if not self.core_seconds_per_sample:
            return said
        wanted = math.ceil(self.samples_per_s / max(1 - self.stall, 1e-3) * self.core_seconds_per_sample)
        if wanted > self.cores:
            return f"{said}; about {_cores(wanted)} would keep up"
        ceiling = f"{rate_shown(self.input_ceiling_samples_per_s)} samples/s"
        return (
            f"{said}; they could make {ceiling}, so more cores would not help. The start of an epoch and the way of small batches take the "
            "time: try longer epochs or larger batches"
        )


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


class WaitClock:
    """The program's side of the measurements. ``ask``: how to learn the other side, that of the processes that make batches."""

    def __init__(self) -> None:
        self.ask: Callable[[], MadeRates] | None = None
        self._rates: Mapping[str, float] = {}
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        with self._lock:
            self._batches = self._samples = 0
            self._seconds = self._waited_s = 0.0
            self._began = self._last = 0.0  # of this epoch; 0: before its first batch
            self._first = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the program waits for a batch."""
        began = time.perf_counter()
        yield
        with self._lock:
            self._last = time.perf_counter()
            # The first batch waits for processes to start, which says nothing about the rate.
            if self._began:
                self._waited_s += self._last - began
            else:
                self._began, self._first = self._last, True

    def count(self, samples: int) -> None:
        """Count a batch."""
        with self._lock:
            # The samples of an epoch's first batch were made before its time began.
            self._samples += 0 if self._first else samples
            self._first = False
            self._batches += 1

    def pause(self) -> None:
        """Stop the time at the last batch, until the next epoch's first one."""
        with self._lock:
            if self._began:
                self._seconds += self._last - self._began
                self._began = 0.0

    def stats(self) -> LoaderStats:
        """The measurements."""
        ask, self.ask = self.ask, None
        if ask is not None:
            self._rates = ask().rates or self._rates
        rates = self._rates
        with self._lock:
            seconds = self._seconds + (self._last - self._began if self._began else 0.0)
            return LoaderStats(
                batches=self._batches,
                samples_per_s=self._samples / seconds if seconds > 0 else 0.0,
                stall=min(self._waited_s / seconds, 1.0) if seconds > 0 else 0.0,
                cores=int(rates.get("cores", 0)),
                input_ceiling_samples_per_s=rates.get("input_ceiling_samples_per_s", 0.0),
                core_seconds_per_sample=rates.get("core_seconds_per_sample", 0.0),
                bytes_per_sample=rates.get("wire_bytes_per_sample", 0.0),
            )
