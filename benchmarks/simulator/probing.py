"""The profile that ``offload probe`` would write of a simulated job: measured with noise, on machines of another day.

The measurements go through the product's own code (:mod:`offload.measure.findings`), which fits the step and states uncertainties.
The probe sees two GPU nodes, so that it times synchronisation between nodes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from benchmarks.simulator.job import Floats, Job
from benchmarks.simulator.steps import slowest_of
from offload.measure.findings import Findings, profile_document
from offload.measure.sizes import MeasuredStep
from offload.model import GradientNoise, Profile

DAY = 0.03
"""Standard deviation of a machine's speed from day to day, of either side (as in :mod:`benchmarks.worlds`)."""
STEPS = 5
TASKS, TASK_SAMPLES = 24, 32
SAMPLE_NOISE = 0.3
"""Coefficient of variation of one sample's core-seconds."""
NOISE_ERROR = 0.15
"""Standard deviation of the logarithm of the measured gradient noise, of |G|² and of the variance."""
PROBED_NODES = 2


def probe(job: Job, device: str, rng: np.random.Generator, *, day: float = DAY) -> Profile:
    """The profile of a probe on ``device``; ``day``: how much its machines differ from those that will train."""
    largest = max(min(job.max_local_batch, 512), 8)
    sizes = sorted({max(largest // 2**i, 1) for i in range(4)})
    machine = math.exp(day * rng.standard_normal())
    steps = [_step(job, size, machine, rng) for size in sizes]
    tasks = job.core_seconds * math.exp(day * rng.standard_normal())
    tasks = tasks * _noisy(SAMPLE_NOISE, (TASKS, TASK_SAMPLES), rng).mean(axis=1)
    ingest = job.ingest_samples_per_s
    document = profile_document(
        Findings(
            workload="simulated",
            buffered_blocks=8,
            core_seconds=tasks.tolist(),
            wire_bytes=job.wire_bytes,
            raw_bytes=0.0,
            ingest_samples_per_s=float(ingest * _noisy(0.05, (1,), rng)[0]) if math.isfinite(ingest) else None,
            stages=[],
            exact_over_auto=None,
            constant=None,
            steps=steps,
            blocks=0,
            gradient_bytes=1e8,
            nodes=PROBED_NODES,
            workers=PROBED_NODES,
            gradients=[],
            samples_each=0,
            gradients_s=0.0,
            batch_size=job.batches[0],
            local_batch_size=sizes[-1],
            device=device,
            device_memory_bytes=None,
            cores=8,
            host_cpus_per_worker=job.host_cpus,
            measured={},
        )
    )
    if job.hub is None:
        document["input"]["hub_block_s"] = 0.0
    profile = Profile.from_document(document)
    noise = None
    if job.noise is not None:
        sqr, var = (value * math.exp(NOISE_ERROR * rng.standard_normal()) for value in (job.noise.sqr, job.noise.var))
        noise = GradientNoise(sqr=sqr, var=var, batch_size=job.noise.batch_size, sqr_error=NOISE_ERROR * sqr)
    return replace(
        profile, noise=noise, batch_size=job.batches[0], max_local_batch_size=float(min(job.max_local_batch, 1 << 20))
    )


def _step(job: Job, size: int, machine: float, rng: np.random.Generator) -> MeasuredStep:
    compute = float(job.step.compute_time_s(size)) * machine
    varies = max(job.step.variation, 0.01)
    alone = compute * _noisy(varies, (STEPS,), rng)
    slow = compute * slowest_of(PROBED_NODES, varies, rng.random(STEPS))
    sync = float(job.step.sync_time_s(PROBED_NODES, PROBED_NODES))
    together = (slow**job.step.gamma + sync**job.step.gamma) ** (1 / job.step.gamma)
    return MeasuredStep(
        size=size,
        step_s=float(np.median(alone)),
        synced_s=float(np.median(together)),
        variation=float(np.std(alone, ddof=1) / np.mean(alone)),
    )


def _noisy(variation: float, size: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Log-normal factors with mean 1."""
    sigma = math.sqrt(math.log1p(variation**2))
    return np.exp(sigma * rng.standard_normal(size) - sigma**2 / 2)
