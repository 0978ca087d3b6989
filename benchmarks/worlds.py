"""Random worlds that a probe measures with noise, and what a plan's range says of them.

Each world has true times. A simulated probe measures them with noise and writes a profile as ``offload probe`` does. The plan runs on other
machines, whose speed differs by ``DAY`` (standard deviation). One side binds by far: the overlap of both has a check of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.measure.findings import Findings, profile_document
from offload.measure.sizes import MeasuredStep
from offload.model import Catalog, NodeType, Profile, StepTime, plan
from offload.model.planning.plans import Candidate

Floats = NDArray[np.float64]

DAY = 0.03
SIZES = (8, 16, 32, 64)
STEPS = 5  # of each size
TASKS, TASK_SAMPLES = 24, 32
RUN_STEPS = 400


@dataclass(frozen=True)
class Scenario:
    """What is probed and planned.

    Args:
        label: the row's name.
        step_noise: coefficient of variation of one worker's step.
        sample_noise: the same for a sample's core-seconds.
        input_binds: whether the input binds, else the accelerators.
        probed_workers: on one node.
        nodes, gpus: planned nodes, and the GPUs of each.
        local_batch_size: planned, of each worker.
    """

    label: str
    step_noise: float = 0.05
    sample_noise: float = 0.3
    input_binds: bool = False
    probed_workers: int = 1
    nodes: int = 1
    gpus: int = 1
    local_batch_size: int = 64


SCENARIOS = (
    Scenario("step noise 5 %"),
    Scenario("step noise 10 %", step_noise=0.1),
    Scenario("samples vary by 0.3", input_binds=True),
    Scenario("samples vary by 1", input_binds=True, sample_noise=1.0),
    Scenario("samples vary by 3", input_binds=True, sample_noise=3.0),
    Scenario("4 × the probed local batch", local_batch_size=256),
    Scenario("2 workers probed, 4 on a node planned", probed_workers=2, gpus=4),
    Scenario("2 workers probed, 4 planned, steps vary by 20 %", probed_workers=2, gpus=4, step_noise=0.2),
    Scenario("2 workers probed, 2 nodes planned", probed_workers=2, nodes=2),
    Scenario("1 worker probed, 4 on a node planned", gpus=4),
    Scenario("1 worker probed, 4 nodes planned", nodes=4),
)


class Outcome(NamedTuple):
    """The plan's rate, its range, and the true rate, in samples/s."""

    rate: float
    low: float
    high: float
    true: float


def outcome(scenario: Scenario, rng: np.random.Generator) -> Outcome:
    """Probe and plan one random world."""
    beta = 10 ** rng.uniform(-3.5, -2.5)
    alpha = beta * rng.uniform(2, 20)
    gradient_bytes, gbps = 10 ** rng.uniform(7, 9), float(rng.choice([10.0, 25.0, 100.0]))
    workers = scenario.nodes * scenario.gpus
    # A ring, over links that deliver a part of what they could; backward hides it more or less.
    sent = 2 * gradient_bytes
    intra = sent / 10e9 / rng.uniform(0.5, 5)
    inter = intra + sent * (1 - 1 / max(scenario.nodes, 2)) / (gbps * 1e9 / 8) / rng.uniform(0.3, 0.9)
    truth = StepTime(alpha, beta, intra, 0.02 * intra, inter, 0.0, gamma=rng.uniform(1, 8))
    core_seconds = 0.05 if scenario.input_binds else 1e-6
    found = _probed(scenario, truth, core_seconds, gradient_bytes, rng)
    box = NodeType(
        name="box",
        vcpus=9 + workers,
        memory_gib=64,
        gpus=scenario.gpus,
        network_gbps=gbps,
        usd_per_hour=1.0,
        gpu_model="NVIDIA A10G",
    )
    batch = workers * scenario.local_batch_size
    made = plan(
        Profile.from_document(profile_document(found)),
        Catalog({"box": box}),
        gpu_types=["box"],
        gpu_nodes=(scenario.nodes, scenario.nodes),
        batch_size=batch,
    ).best
    if scenario.input_binds:
        true = box.vcpus - made.workers
        return Outcome(*_range(made), true / core_seconds * math.exp(DAY * rng.normal()))
    took = _run(truth, scenario, made.workers, batch // made.workers, rng)
    return Outcome(*_range(made), made.batch_size / took * math.exp(DAY * rng.normal()))


def coverage(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The share of worlds whose range holds the truth, the median half-width, and that of an oracle.

    The oracle gives all worlds of a scenario one half-width: the least that holds 95 % of them. Half-widths are differences of logarithms.
    """
    rate, low, high, true = np.array(outcomes).T
    oracle = float(np.quantile(np.abs(np.log(true / rate)), 0.95))
    half = float(np.median(np.log(high / low) / 2))
    return {
        "worlds": len(outcomes),
        "coverage": round(float(np.mean((low <= true) & (true <= high))), 3),
        "half_width": round(half, 4),
        "oracle_half_width": round(oracle, 4),
        "half_width_over_oracle": round(half / oracle, 2),
        "median_error": round(float(np.median(np.abs(true / rate - 1))), 4),
    }


def _range(made: Candidate) -> tuple[float, float, float]:
    return made.samples_per_s, made.samples_per_s_low, made.samples_per_s_high


def _noisy(cv: float, size: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Log-normal factors with mean 1."""
    sigma = math.sqrt(math.log1p(cv**2))
    return np.exp(sigma * rng.normal(size=size) - sigma**2 / 2)


def _run(truth: StepTime, scenario: Scenario, workers: int, local: int, rng: np.random.Generator) -> float:
    """Mean seconds of a step in which all workers wait for the slowest."""
    slowest = _noisy(scenario.step_noise, (RUN_STEPS, workers), rng).max(axis=1)
    compute = float(truth.compute_time_s(local)) * slowest
    sync = float(truth.sync_time_s(min(scenario.nodes, workers), workers))
    return float(np.mean((compute**truth.gamma + sync**truth.gamma) ** (1 / truth.gamma)))


def _probed(
    scenario: Scenario, truth: StepTime, core_seconds: float, gradient_bytes: float, rng: np.random.Generator
) -> Findings:
    steps = []
    for size in SIZES:
        compute = float(truth.compute_time_s(size))
        alone = compute * _noisy(scenario.step_noise, (STEPS,), rng)
        together = 0.0
        if scenario.probed_workers > 1:
            slow = compute * _noisy(scenario.step_noise, (STEPS, scenario.probed_workers), rng).max(axis=1)
            sync = float(truth.sync_time_s(1, scenario.probed_workers))
            together = float(np.median((slow**truth.gamma + sync**truth.gamma) ** (1 / truth.gamma)))
        varies = float(np.std(alone, ddof=1) / np.mean(alone))
        steps.append(MeasuredStep(size=size, step_s=float(np.median(alone)), synced_s=together, variation=varies))
    tasks = core_seconds * _noisy(scenario.sample_noise, (TASKS, TASK_SAMPLES), rng).mean(axis=1)
    return Findings(
        workload="",
        buffered_blocks=8,
        core_seconds=tasks.tolist(),
        wire_bytes=1.0,
        raw_bytes=0.0,
        ingest_samples_per_s=None,
        stages=[],
        exact_over_auto=None,
        constant=None,
        steps=steps,
        blocks=0,
        gradient_bytes=gradient_bytes,
        nodes=1,
        workers=scenario.probed_workers,
        gradients=[],
        samples_each=0,
        gradients_s=0.0,
        batch_size=SIZES[-1],
        local_batch_size=SIZES[-1],
        device="NVIDIA A10G",
        device_memory_bytes=None,
        cores=9,
        host_cpus_per_worker=1.0,
        measured={},
    )
