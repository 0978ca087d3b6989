"""Measurements over many intervals: the whole run, or its last size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.report.page.records import Floats, Intervals

PARTS = {
    "data_wait_s": "waiting for data",
    "peer_wait_s": "other ranks' data",
    "compute_s": "compute",
    "sync_s": "synchronise gradients",
    "other_s": "rest of the loop",
}
"""The parts of a step's time and their names. The rest is what the user's loop does between two batches."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Sums and medians over intervals. Rates are per second in which the workers stepped.

    Args:
        samples: trained samples.
        stepping_s: seconds in which the workers stepped, the mean over the ranks.
        samples_per_s, step_s: the throughput, and the mean time of an optimizer step.
        stall, busy: shares of the step time: waiting for data, and computing or synchronising.
        parts_s: the mean seconds of a step by part (:data:`PARTS`).
        workers, global_batch_size, local_batch_size, cores: the last ones.
        input_ceiling, input_pace: samples/s that the preprocessing cores could deliver, by CPU time and by the clock; None if unknown.
        core_seconds_per_sample, wire_bytes_per_sample, blocked: the cost of preprocessing; None if unknown.
    """

    samples: float
    stepping_s: float
    samples_per_s: float
    step_s: float
    stall: float
    busy: float
    parts_s: dict[str, float]
    workers: int
    global_batch_size: int
    local_batch_size: int
    cores: int | None
    input_ceiling: float | None
    input_pace: float | None
    core_seconds_per_sample: float | None
    wire_bytes_per_sample: float | None
    blocked: float | None

    @property
    def working_s(self) -> float:
        """The mean seconds of a step without its waits for data: what a step would take with infinitely fast input."""
        return sum(self.parts_s[name] for name in ("compute_s", "sync_s", "other_s"))


def other_s(intervals: Intervals) -> Floats:
    """Seconds of each interval's step time that belong to no measured part."""
    known = sum(np.nan_to_num(intervals[name]) for name in list(PARTS)[:-1])
    rest: Floats = np.maximum(np.nan_to_num(intervals["step_time_s"]) - known, 0.0)
    return rest


def usable(intervals: Intervals) -> NDArray[np.bool_]:
    """The intervals in which steps were made, and whose size is known."""
    where: NDArray[np.bool_] = (
        (intervals["samples_per_s"] > 0) & (intervals["step_time_s"] > 0) & (intervals["workers"] >= 1)
    )
    return where


def workers_of(intervals: Intervals) -> Floats:
    """The workers of each interval; NaN where a damaged line has none."""
    workers: Floats = np.where(intervals["workers"] >= 1, intervals["workers"], np.nan)
    return workers


def samples_of(intervals: Intervals) -> Floats:
    """The samples of each interval."""
    # The rate is per second of one worker, and the step time the sum over all workers.
    samples: Floats = intervals["samples_per_s"] * intervals["step_time_s"] / workers_of(intervals)
    return samples


def stalls(intervals: Intervals) -> Floats:
    """The stall of each interval; NaN without a step."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: Floats = np.clip(intervals["data_wait_s"] / intervals["step_time_s"], 0.0, 1.0)
    return shares


def last_size(intervals: Intervals) -> NDArray[np.bool_]:
    """The usable intervals since the last change of workers, batch or preprocessing cores."""
    sound = usable(intervals)
    places = np.flatnonzero(sound)
    if not len(places):
        return sound
    same = sound.copy()
    for name in ("workers", "local_batch_size", "accum_steps", "preprocessing_cores"):
        column = np.nan_to_num(intervals[name], nan=-1.0)
        same &= column == column[places[-1]]
    # Keep only the unbroken stretch up to the end. Earlier intervals at the same size may have had other nodes.
    other = np.flatnonzero(sound & ~same)
    if len(other):
        same[: other[-1] + 1] = False
    return same


def measured(intervals: Intervals, where: NDArray[np.bool_]) -> Measurements | None:
    """The measurements over these intervals; None if there is no step among them."""
    where = where & usable(intervals)
    if not where.any():
        return None
    samples = samples_of(intervals)[where]
    step_time_s = float(np.sum(intervals["step_time_s"][where]))
    stepping = intervals["step_time_s"][where] / workers_of(intervals)[where]
    batch = _batch(intervals)[where]
    steps = float(np.sum(samples / batch))
    rest = other_s(intervals)[where]
    sums = {name: float(np.nansum(intervals[name][where])) for name in list(PARTS)[:-1]} | {
        "other_s": float(np.sum(rest))
    }
    stepping_s = float(np.sum(stepping))
    step_s = stepping_s / steps

    def median(name: str) -> float | None:
        values = intervals[name][where]
        values = values[np.isfinite(values) & (values >= 0)]
        return float(np.median(values)) if len(values) else None

    def last(name: str) -> float | None:
        values = intervals[name][where]
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    cores, workers = last("preprocessing_cores"), int(last("workers") or 1)
    return Measurements(
        samples=float(np.sum(samples)),
        stepping_s=stepping_s,
        samples_per_s=float(np.sum(samples)) / stepping_s,
        step_s=step_s,
        stall=min(sums["data_wait_s"] / step_time_s, 1.0),
        busy=min((sums["compute_s"] + sums["sync_s"]) / step_time_s, 1.0),
        parts_s={name: value / step_time_s * step_s for name, value in sums.items()},
        workers=workers,
        global_batch_size=int(batch[-1]),
        local_batch_size=max(int(last("local_batch_size") or batch[-1] / workers), 1),
        cores=None if cores is None else int(cores),
        input_ceiling=median("input_ceiling_samples_per_s") or None,
        input_pace=median("input_pace_samples_per_s") or None,
        core_seconds_per_sample=median("core_seconds_per_sample") or None,
        wire_bytes_per_sample=median("wire_bytes_per_sample"),
        blocked=median("blocked"),
    )


def _batch(intervals: Intervals) -> Floats:
    """The global batch of each interval. Runs of earlier versions give only its parts."""
    parts = intervals["workers"] * intervals["local_batch_size"] * (np.nan_to_num(intervals["accum_steps"]) + 1)
    batch = np.where(np.isfinite(intervals["global_batch_size"]), intervals["global_batch_size"], parts)
    sizes: Floats = np.where(np.isfinite(batch) & (batch >= 1), batch, 1.0)
    return sizes
