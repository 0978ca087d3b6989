"""The steady rate of many shapes at once, and the dollars of a useful sample: the judge of every policy.

Interruptions count by their means: :mod:`run` plays them event by event, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.stats

from benchmarks.simulator.flow import flow
from benchmarks.simulator.job import Fleet, Floats, Job
from benchmarks.simulator.steps import step_over_longer

PRESENT = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
"""Quantiles of the number of present spot nodes over which a rate is averaged."""
WEIGHTS = np.array([0.15, 0.225, 0.25, 0.225, 0.15])


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Samples/s, useful samples/s, the price, and what the accelerators alone would reach.

    ``seen_samples_per_s`` leaves out restarts: what a job measures while it trains.
    """

    samples_per_s: Floats
    seen_samples_per_s: Floats
    goodput: Floats
    usd_per_hour: Floats
    device_samples_per_s: Floats

    @property
    def usd_per_million(self) -> Floats:
        """Dollars for a million useful samples."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.usd_per_hour / 3600 * 1e6 / self.goodput)


def steady(
    job: Job, fleet: Fleet, batch: Floats | float, *, spot: str = "none", host_cores: float | None = None
) -> Steady:
    """The steady state of a fleet with this global batch; all counts and batches broadcast.

    ``host_cores``: of each GPU node, if not all that are free preprocess (:func:`flow`).
    """
    whole = np.asarray(batch, dtype=float)
    workers = np.asarray(fleet.workers, dtype=float)
    micro, accum = split(job, whole, workers)
    gpu_s = np.asarray(job.step.predict(fleet.hosts, workers, micro, accum), dtype=float)
    helpers = np.asarray(fleet.helpers, dtype=float)
    away = _away(job, fleet.helper.name) if fleet.helper is not None and spot != "none" else 0.0
    if away:
        present = [scipy.stats.binom.ppf(q, fleet.helpers, 1 - away) for q in PRESENT]
        rates = [flow(job, fleet, local_batch=micro, helpers=here, host_cores=host_cores) for here in present]
        parts = [_paced(job, gpu_s, whole, each.samples_per_s, each.rows_per_block, workers) for each in rates]
        rate = np.asarray(sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True)))
    else:
        full = flow(job, fleet, local_batch=micro, host_cores=host_cores)
        rate = _paced(job, gpu_s, whole, full.samples_per_s, full.rows_per_block, workers)
    price = fleet.usd_per_hour(spot)
    if fleet.helper is not None and away:
        price = price - away * helpers * float(fleet.helper.spot_usd_per_hour or fleet.helper.usd_per_hour)
    seen = rate
    if spot == "all":
        lost = interrupted_share(job, fleet)
        rate = rate / (1 + lost)
    efficiency = 1.0 if job.noise is None else np.asarray(job.noise.efficiency(whole))
    rate, seen, useful, price, device = np.broadcast_arrays(rate, seen, rate * efficiency, price, whole / gpu_s)
    return Steady(
        samples_per_s=rate, seen_samples_per_s=seen, goodput=useful, usd_per_hour=price, device_samples_per_s=device
    )


def split(job: Job, batch: Floats, workers: Floats) -> tuple[Floats, Floats]:
    """Micro-batch and accumulation steps of each worker: as few as fit its memory."""
    share = np.ceil(batch / workers)
    accum = np.maximum(np.ceil(share / job.max_local_batch) - 1, 0)
    return np.asarray(np.ceil(share / (accum + 1))), np.asarray(accum)


def interrupted_share(job: Job, fleet: Fleet) -> Floats:
    """Seconds lost for each second of training, where GPU nodes are spot capacity: two restarts of all, one node for a while."""
    per_s = job.interruptions_per_hour.get(fleet.host.name, 0.0) / 3600
    return np.asarray(per_s * (fleet.hosts * 2 * job.restart_s + job.replacement_s))


def _paced(job: Job, gpu_s: Floats, batch: Floats, rate: Floats, rows: Floats, workers: Floats) -> Floats:
    """Samples/s where steps of ``gpu_s`` wait for batches that arrive at ``rate``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        wait_s = batch / rate
        ratio = np.where(rate > 0, wait_s / gpu_s, np.inf)
    blocks = float(np.median(np.maximum(batch / np.maximum(rows, 1.0), 1.0)))
    slowed = step_over_longer(
        ratio,
        workers=int(np.median(workers)),
        step_variation=job.step.variation,
        input_variation=min(job.task_variation / np.sqrt(blocks), 1.0),
        room=job.buffered_batches,
    )
    with np.errstate(divide="ignore"):
        return np.asarray(
            np.where(rate > 0, batch / (np.maximum(gpu_s, np.where(rate > 0, wait_s, 0.0)) * slowed), 0.0)
        )


def _away(job: Job, name: str) -> float:
    """The share of time in which a spot node is absent."""
    lost = job.interruptions_per_hour.get(name, 0.0) * job.replacement_s / 3600
    return lost / (1 + lost)
