"""Turn a probe's measurements into profile.json and a verdict in plain words. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special

from offload.errors import ConfigError, RunError
from offload.formatting import rate_shown
from offload.measure.equivalents import Constant, advice, faster_equivalent
from offload.measure.sizes import FEW_STEPS, STEPS, MeasuredStep, at_whole_depth, largest_that_fits
from offload.measure.steps import INPUT_BOUND
from offload.model.fit import StepTimeFit, fit_step_time
from offload.model.goodput import JointGoodput
from offload.model.input_rate import REMOTE_CORE_SECONDS_PER_BYTE
from offload.model.noise import GradientNoise, noise_from_gradients
from offload.model.overlap import LEAST_VARIATION, overlap_of_queue
from offload.model.profile import SCHEMA
from offload.model.step_time import slowest

LEAST_UNCERTAINTY = 0.01
ONE_TASK_UNCERTAINTY = 0.4
STEPS_WEIGHT = 4.0  # weight of the noise between steps of one size, in sizes: less than their number, since sizes differ more than steps
LARGE_STAGE = 0.05  # share of core-seconds from which on a verdict names a stage
WORTH_SAYING = 0.02  # share of core-seconds whose saving by decoding only what crops need is worth a sentence
QUEUEING_OF_COMPUTING = 0.5  # cores that queue steps on a GPU, for each that computes them on a CPU: an assumption


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All measurements of a probe, per sample and in seconds.

    Args:
        workload: the script.
        buffered_blocks: the blocks that a worker fetches ahead.
        core_seconds: busy CPU time per sample of each preprocessing task, with all cores busy.
        wire_bytes: bytes shipped per sample.
        raw_bytes: bytes read from files per sample; 0 if unknown.
        ingest_samples_per_s: the rate at which the worker takes in batches.
        stages: (name, share of the core-seconds, output bytes or None).
        exact_over_auto: the core-seconds with ``decode="exact"`` over those measured; None if whole images were decoded anyway.
        constant: the first stages, which draw no random numbers; None if there are none, or nothing tells.
        steps: the local batch sizes measured, at the model's full depth.
        blocks: the number of the model's repeated blocks if the probe measured a smaller depth, else 0.
        gradient_bytes: bytes of one worker's gradients at the model's full depth; None: unknown.
        nodes, workers: the nodes and workers of the steps with synchronisation; 1 and 1 without any.
        gradients: for each gradient of ``samples_each`` samples, at equal parameters, its squared norm and its scalar product with the
            sum of those before it.
        samples_each: the samples behind each gradient.
        gradients_s: the seconds that the gradients took.
        batch_size: the script's initial global batch.
        local_batch_size: the local batch of its workers.
        device: the accelerator's name, or ``cpu``.
        device_memory_bytes: the accelerator's memory, if known.
        cores: the cores that preprocess on this machine while the script trains.
        workers_here: the workers with which the script would train on this machine.
        host_cpus_per_worker: the cores that a worker takes from preprocessing.
        measured: facts that reveal a stale profile.
    """

    workload: str
    buffered_blocks: int
    core_seconds: Sequence[float]
    wire_bytes: float
    raw_bytes: float
    ingest_samples_per_s: float | None
    stages: Sequence[tuple[str, float, float | None]]
    exact_over_auto: float | None
    constant: Constant | None
    steps: Sequence[MeasuredStep]
    blocks: int
    gradient_bytes: float | None
    nodes: int
    workers: int
    gradients: Sequence[tuple[float, float]]
    samples_each: int
    gradients_s: float
    batch_size: int
    local_batch_size: int
    device: str
    device_memory_bytes: float | None
    cores: int
    workers_here: int = 1
    host_cpus_per_worker: float
    measured: Mapping[str, Any]

    @property
    def core_seconds_per_sample(self) -> float:
        """The core-seconds per sample of the mean task: cores make as many samples as their mean task lets them."""
        return float(np.mean(self.core_seconds))

    @functools.cached_property
    def fit(self) -> StepTimeFit:
        """The step time, fitted to the measured sizes."""
        count = len(self.steps)
        alone = [step.step_s for step in self.steps]
        # The wait for the slowest worker is no synchronisation: the model counts it apart.
        waits = float(slowest(self.workers, self.step_variation)) - 1
        # At least as long as alone: noise must not make synchronisation negative.
        together = [max((step.synced_s or step.step_s) - waits * step.step_s, step.step_s) for step in self.steps]
        sizes = [step.size for step in self.steps]
        known: dict[str, float] = {}
        if self.step_variation > 0:
            # A size's time is a median of steps, whose own variation tells its noise.
            repeats = FEW_STEPS if self.device == "cpu" else STEPS
            noise = max(self.step_variation * math.sqrt(math.pi / 2 / repeats), LEAST_UNCERTAINTY)
            known = {"noise": noise, "noise_weight": STEPS_WEIGHT}
        return fit_step_time([self.nodes] * count, [self.workers] * count, sizes, alone, together, **known)

    @property
    def step_variation(self) -> float:
        """The coefficient of variation of a step's time from step to step: the median over the sizes, so that one hiccup does not
        count."""
        return min(float(np.median([step.variation for step in self.steps])), 1.0)

    @property
    def noise(self) -> GradientNoise | None:
        """Gradient noise at the initial batch, or None if the gradients do not reveal it."""
        if len(self.gradients) < 2 or not np.isfinite(self.gradients).all():
            return None
        squares, products = zip(*self.gradients, strict=True)
        return noise_from_gradients(squares, products, self.samples_each, float(self.batch_size))

    @property
    def noise_samples(self) -> int:
        """The samples whose gradients were compared."""
        return len(self.gradients) * self.samples_each

    @property
    def gpu_ceiling(self) -> float:
        """The rate of this machine's workers without the input, in samples/s."""
        return self.workers_here * self.local_batch_size / self._step_s

    @property
    def ingest_ceiling(self) -> float:
        """The rate at which this machine's workers take in batches, in samples/s."""
        return self.workers_here * (self.ingest_samples_per_s or math.inf)

    @property
    def accelerator(self) -> str:
        """What trains on this machine, in words."""
        if self.device == "cpu":
            return "worker's CPU"
        return self.device if self.workers_here == 1 else f"group of {self.workers_here} {self.device}"

    @property
    def _step_s(self) -> float:
        return float(self.fit.step_time.predict(1, self.workers_here, self.local_batch_size))

    @property
    def overlap(self) -> float:
        """The overlap of fetching and computing, from the number of buffered blocks and the variation of tasks."""
        return overlap_of_queue(self.buffered_blocks, max(self.variation, LEAST_VARIATION))

    @property
    def variation(self) -> float:
        """The coefficient of variation of the tasks' core-seconds per sample."""
        return float(np.std(self.core_seconds) / np.mean(self.core_seconds))

    @property
    def input_ceiling(self) -> float:
        """The rate of this machine's cores without the accelerator, in samples/s."""
        return min(self.cores / self.core_seconds_per_sample, self.ingest_ceiling)

    @property
    def stall(self) -> float:
        """The share of a step in which the script will wait for data on this machine."""
        joint = JointGoodput(self.fit.step_time, None, self.input_ceiling, overlap=self.overlap)
        return 1 - self._step_s / float(joint.step_time_s(1, self.workers_here, self.local_batch_size, 0))


def profile_document(findings: Findings) -> dict[str, Any]:
    """The document of profile.json: a plan's input, with the ceilings and the verdict.

    Raises RunError if nothing was measured.
    """
    if not findings.core_seconds:
        raise RunError("no preprocessing task finished while the input was drained: is one sample minutes of work?")
    if not findings.steps:
        raise RunError("no step was measured.")
    w, fit, noise = findings.core_seconds_per_sample, findings.fit, findings.noise
    step = fit.step_time
    return {
        "schema": SCHEMA,
        "workload": findings.workload,
        "input": {
            "core_seconds_per_sample": w,
            "contention": 0.0,  # measured with all cores busy
            "raw_bytes_per_sample": findings.raw_bytes,
            "wire_bytes_per_sample": findings.wire_bytes,
            "ingest_samples_per_s_per_worker": findings.ingest_samples_per_s,
            "storage_bytes_per_s": None,
            "remote_core_seconds_per_byte": REMOTE_CORE_SECONDS_PER_BYTE,
            "stages": [
                {"name": name, "core_seconds_per_sample": share * w, "bytes_out": size}
                for name, share, size in findings.stages
            ],
            "constant": None if findings.constant is None else dataclasses.asdict(findings.constant),
        },
        "step": {
            "device": findings.device,
            "alpha_compute": step.alpha_compute,
            "beta_compute": step.beta_compute,
            "alpha_intra": step.alpha_intra,
            "beta_intra": step.beta_intra,
            "alpha_inter": step.alpha_inter,
            "beta_inter": step.beta_inter,
            "gamma": step.gamma,
            "variation": findings.step_variation,
            "nodes": findings.nodes,
            "workers": findings.workers,
            "gradient_bytes": findings.gradient_bytes,
            "max_local_batch_size": largest_that_fits(findings.steps, findings.device_memory_bytes),
        },
        "overlap": findings.overlap,
        "host_cpus_per_worker": findings.host_cpus_per_worker,
        "batch_size": findings.batch_size,
        "noise": None
        if noise is None
        else {
            "sqr": noise.sqr,
            "var": noise.var,
            "batch_size": findings.batch_size,
            "sqr_error": noise.sqr_error,
            "samples": findings.noise_samples,
        },
        "uncertainty": {
            "core_seconds_per_sample": _uncertainty_of_mean(findings.core_seconds),
            "step": min(max(float(fit.uncertainty(1, 1, findings.local_batch_size)), LEAST_UNCERTAINTY), 1.0),
            "step_directions": fit.directions.tolist(),
            "local_batch_sizes": [min(step.size for step in findings.steps), max(step.size for step in findings.steps)],
        },
        "measured": dict(findings.measured),
        "ceilings": {
            "gpu_samples_per_s": findings.gpu_ceiling,
            "input_samples_per_s": findings.input_ceiling,
            "stall": findings.stall,
        },
        "verdict": verdict(findings),
    }


def _uncertainty_of_mean(values: Sequence[float]) -> float:
    """The relative 95 % half-width of the mean, between LEAST_UNCERTAINTY and 1. A single value counts as ± 40 %.

    Student's t, and the first term for skewness: few values of a skewed distribution rarely hold its largest, and then both their mean and
    their spread are too small. Source: Johnson, "Modified t tests and confidence intervals for asymmetrical populations", JASA, 1978.
    """
    count, mean = len(values), float(np.mean(values))
    if count == 1:
        return ONE_TASK_UNCERTAINTY
    spread = float(np.std(values, ddof=1))
    student = float(scipy.special.stdtrit(count - 1, 0.975))
    half = spread * student / math.sqrt(count)
    if spread > 0:
        skewness = float(np.mean((np.asarray(values) - mean) ** 3)) / spread**3
        half += max(skewness, 0.0) * spread * (1 + 2 * student**2) / (6 * count)
    return min(max(half / mean, LEAST_UNCERTAINTY), 1.0)


def verdict(findings: Findings) -> list[str]:
    """The verdict in plain words: both ceilings, the bottleneck, the costs of preprocessing, and remedies."""
    kind = findings.accelerator
    w = findings.core_seconds_per_sample
    cores = f"{findings.cores} core{'s' if findings.cores != 1 else ''}"
    said = [
        f"Input ceiling {rate_shown(findings.input_ceiling)} samples/s on {cores} of this machine ({w * 1000:,.3g} core-ms a sample); "
        f"ceiling of the {kind} {rate_shown(findings.gpu_ceiling)} samples/s at a local batch of {findings.local_batch_size}."
    ]
    wanted = math.ceil(findings.gpu_ceiling * w)
    ingest = findings.ingest_ceiling
    if findings.stall >= INPUT_BOUND:
        said.append(f"The input binds: a step will wait for data {findings.stall:.0%} of its time.")
        if ingest < findings.gpu_ceiling:
            said.append(
                f"More cores lift it to {rate_shown(ingest)} samples/s at most, the rate that the worker itself can take in. Smaller "
                "samples (uint8, a smaller size) would raise that."
            )
        else:
            # Ceilings that nearly meet stall, too: batches come unevenly, so it takes a core more than those here.
            wanted = max(wanted, findings.cores + 1)
            said.append(
                f"{wanted:,} cores like these would keep the {kind} busy, {wanted - findings.cores:,} more than preprocess here."
            )
    else:
        said.append(
            f"The {kind} binds (stall {findings.stall:.0%}): preprocessing on more CPUs will not speed this up. "
            f"{wanted:,} core{'s' if wanted != 1 else ''} would be enough for it."
        )
    for name, share, _ in sorted(findings.stages, key=lambda stage: -stage[1]):
        if share >= LARGE_STAGE:
            better = faster_equivalent(name)
            said.append(f"{name}: {share:.0%} of core-seconds{f'; {better}' if better else ''}.")
    saved = 1 - 1 / (findings.exact_over_auto or 1.0)
    if saved >= WORTH_SAYING:
        said.append(f"Decoding only what crops need saves {saved:.0%} of core-seconds.")
    elif saved <= -WORTH_SAYING:
        said.append(f'Decoding only what crops need costs {-saved:.0%} more core-seconds: pass decode="exact".')
    if (kept := advice(findings.constant, w)) is not None:
        said.append(kept)
    return said + _caveats(findings)


def _caveats(findings: Findings) -> list[str]:
    """Sentences about assumptions, and about measurements on smaller models or batches."""
    said = []
    if findings.device == "cpu":
        said.append(
            "There is no GPU here: the step was measured on one CPU core. Say how much faster the planned GPU is "
            "(offload plan --gpu-speed), or probe on one."
        )
    if findings.workers == 1:
        said.append(
            "Synchronisation between workers was not measured, since there was only one: a plan guesses it from the gradients' size "
            "and the network. Probe a Trainer with workers=2, where two fit, to measure it."
        )
    if findings.blocks:
        said.append(
            f"To save time the step was measured with one and with two of the model's {findings.blocks} equal blocks, and the gradient "
            "noise with one."
        )
    noise = findings.noise
    if noise is not None and not noise.told:
        missing = noise.samples_missing(findings.noise_samples)
        took_s = findings.gradients_s * missing / findings.noise_samples
        said.append(
            f"{findings.noise_samples:,} samples are too few to measure the gradient noise well, so a plan enlarges the batch cautiously. "
            f"The probe would need at least {missing:,} more samples, about {max(took_s, 0.1):,.1f} s."
        )
    small = [step.size for step in findings.steps]
    if max(small) < findings.local_batch_size:
        said.append(
            f"To save time the step was measured with local batches of {', '.join(map(str, small))} and extrapolated to "
            f"{findings.local_batch_size}."
        )
    return said


def findings_of(event: Mapping[str, Any], *, reserved_cpus: float, **known: Any) -> Findings:
    """The findings from the worker's measurements. ``reserved_cpus``: the cores that the script reserves for a worker on a GPU. The
    measured use besides preprocessing counts if it is higher: what delivers the batches, and what queues steps on a GPU. Raises
    ConfigError if nothing was preprocessed."""
    costs = [cost for cost in event["costs"] if cost[0] > 0]
    if not costs:
        raise ConfigError("no preprocessing task finished in time. Is one sample minutes of work?")
    stages = event["stages"] or {"shares": [], "raw_bytes_per_sample": 0.0, "exact_over_auto": None, "constant": None}
    steps = [MeasuredStep(**step) for step in event["steps"]]
    usual = min(steps, key=lambda step: abs(step.size - known["local_batch_size"]), default=None)
    queueing = 0.0 if usual is None else min(usual.host_s / usual.step_s, 1.0)
    if event["device"] == "cpu":
        queueing *= QUEUEING_OF_COMPUTING
    return Findings(
        core_seconds=[cpu + event["raylet_s_per_sample"] for cpu, _ in costs],
        wire_bytes=float(np.median([size for _, size in costs])),
        raw_bytes=stages["raw_bytes_per_sample"],
        ingest_samples_per_s=event["ingest_samples_per_s"],
        stages=[(name, share, size) for name, share, size in stages["shares"]],
        exact_over_auto=stages["exact_over_auto"],
        constant=None if stages["constant"] is None else Constant(**stages["constant"]),
        steps=at_whole_depth(steps, event["blocks"]),
        blocks=event["blocks"],
        gradient_bytes=event["gradient_bytes"] or None,
        nodes=event["nodes"],
        workers=event["workers"],
        gradients=[(a, b) for a, b in event["gradients"]],
        samples_each=event["samples_each"],
        gradients_s=event["gradients_s"],
        host_cpus_per_worker=max(reserved_cpus, event["beside_cpus"] / event["workers"] + queueing),
        device=event["device"],
        device_memory_bytes=event["device_memory_bytes"],
        **known,
    )
