"""How long planning takes, and how far its recommendation is from exhaustive enumeration.

    python benchmarks/planning.py [-o benchmarks/results/planning.json]

The benchmark plans four spaces, each several times. Three have six CPU types × 0–64 nodes × 1–16 GPU nodes: with a fixed batch, with the
batch chosen by goodput, and the same with 8 GPUs per node. The fourth has 10,000 GPUs and 100,000 CPUs. Then, for a thousand random
profiles and catalogs, the benchmark compares the recommendation with the best of all shapes, worker counts, local batches and
accumulations.
"""

import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import machine, versions
from offload.model import Catalog, GradientNoise, InputRate, JointGoodput, NodeType, Profile, Shape, StepTime, plan
from offload.model.step_ranges import DAY_TO_DAY, Uncertainty
from offload.prices import built_in

CPU_TYPES = ("ml.c5.4xlarge", "ml.c5.9xlarge", "ml.c5.18xlarge", "ml.c6i.8xlarge", "ml.c7i.4xlarge", "ml.m5.4xlarge")
REPEATS = 5
PROFILE = Profile(
    input=InputRate(core_seconds_per_sample=0.029, wire_bytes_per_sample=150_528),
    step_time=StepTime(0.01, 0.0016, 0.001, 0.0, 0.004, 0.0, 1.5),
    noise=GradientNoise(0.00136, 0.000502, 64),
    max_local_batch_size=256,
    uncertainty=Uncertainty(
        core_seconds_per_sample=0.03, step=0.03, local_batch_sizes=(16, 256), day_to_day=DAY_TO_DAY
    ),
)
SPACES: dict[str, dict[str, Any]] = {
    "6 CPU types × 0–64 × 1–16 GPU nodes, fixed batch": {
        "gpu_types": ["ml.g5.xlarge"], "gpu_nodes": (1, 16), "cpu_types": CPU_TYPES, "cpu_nodes": (0, 64), "batch_size": 1024,
    },
    "6 CPU types × 0–64 × 1–16 GPU nodes, batch by goodput": {
        "gpu_types": ["ml.g5.xlarge"], "gpu_nodes": (1, 16), "cpu_types": CPU_TYPES, "cpu_nodes": (0, 64), "max_batch_size": 16384,
    },
    "the same with 8 GPUs a node, batch by goodput": {
        "gpu_types": ["ml.g5.48xlarge"], "gpu_nodes": (1, 16), "cpu_types": CPU_TYPES, "cpu_nodes": (0, 64), "max_batch_size": 16384,
    },
    "10,000 GPUs and 100,000 CPUs, batch by goodput": {
        "gpu_types": ["ml.g5.48xlarge"], "gpu_nodes": (1, 1250), "cpu_types": ["ml.c5.4xlarge"], "cpu_nodes": (0, 6250),
        "max_batch_size": 65536,
    },
}  # fmt: skip


@click.command(help=__doc__)
@click.option("--profiles", default=1000, show_default=True, type=click.IntRange(1), help="Random profiles to compare.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(profiles: int, output: Path | None) -> None:
    times = {name: _seconds(space) for name, space in SPACES.items()}
    for name, seconds in times.items():
        print(f"{name}: {seconds:.2f} s")
    rng = np.random.default_rng(0)
    gaps = [_gap(rng) for _ in track(range(profiles), "comparing")]
    print(
        f"cost above the best of all: worst {max(gaps):.3%}, median {statistics.median(gaps):.3%}, {len(gaps)} profiles"
    )
    if output is not None:
        document = {
            "seconds": times,
            "gap": {"worst": max(gaps), "median": statistics.median(gaps), "profiles": len(gaps)},
            "repeats": REPEATS,
            "machine": machine(),
            "versions": versions(),
            "command": f"python {' '.join(sys.argv)}",
        }
        output.write_text(json.dumps(document, indent=1) + "\n")


def _seconds(space: dict[str, Any]) -> float:
    """Return the median seconds of several plannings."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        plan(PROFILE, built_in(), **space)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _gap(rng: np.random.Generator) -> float:
    """Return the extra cost of a useful sample, relative to the best of all: 0.01 is 1 % more than necessary."""
    gpu = NodeType(
        name="gpu", vcpus=int(rng.integers(2, 64)), memory_gib=64, gpus=int(rng.choice([1, 2, 4])), gpu_model="G",
        network_gbps=float(rng.uniform(1, 50)), usd_per_hour=float(rng.uniform(0.5, 10)),
    )  # fmt: skip
    cpu = NodeType(
        name="cpu", vcpus=int(rng.integers(2, 64)), memory_gib=64, network_gbps=float(rng.uniform(1, 50)),
        usd_per_hour=float(rng.uniform(0.05, 3)), core_speed=float(rng.uniform(0.5, 2)),
    )  # fmt: skip
    beta = 10 ** rng.uniform(-4, -1.5)
    intra, inter = beta * rng.uniform(0, 64), beta * rng.uniform(0, 128)
    initial = int(rng.integers(8, 128))
    profile = Profile(
        input=InputRate(
            core_seconds_per_sample=10 ** rng.uniform(-3.5, -1),
            wire_bytes_per_sample=10 ** rng.uniform(4, 6),
            contention=float(rng.uniform(0, 0.1)),
        ),
        step_time=StepTime(beta * rng.uniform(1, 50), beta, intra, 0.1 * intra, inter, 0.1 * inter, rng.uniform(1, 10)),
        noise=GradientNoise(10 ** rng.uniform(-4, 0), 10 ** rng.uniform(-4, 0), initial),
        max_local_batch_size=float(rng.choice([16, 64, math.inf])),
    )
    most = initial * int(rng.choice([1, 4, 16]))
    made = plan(
        profile, Catalog({"gpu": gpu, "cpu": cpu}), gpu_types=["gpu"], gpu_nodes=(1, 3), cpu_types=["cpu"], cpu_nodes=(0, 6),
        max_batch_size=most,
    )  # fmt: skip
    least = min(
        Shape({gpu: nodes, cpu: cpus}).usd_per_hour / goodput
        for nodes, cpus in itertools.product(range(1, 4), range(7))
        if (goodput := _best_goodput(profile, gpu, cpu, nodes, cpus, most)) > 0
    )
    return float(made.best.usd_per_hour / made.best.goodput / least - 1)


def _best_goodput(profile: Profile, gpu: NodeType, cpu: NodeType, nodes: int, cpus: int, most: int) -> float:
    """Return the highest goodput of a shape, over every worker count, local batch and accumulation."""
    assert profile.noise is not None
    best = 0.0
    for workers in range(1, min(nodes * gpu.gpus, int(profile.noise.batch_size)) + 1):
        rate = profile.input.samples_per_s(Shape({gpu: nodes, cpu: cpus}), workers)
        largest = int(min(most // workers, profile.max_local_batch_size))
        micro = np.arange(1, most // workers + 1)[:, None]
        local = np.arange(1, largest + 1)[None, :]
        whole = workers * local * micro
        allowed = (whole >= profile.noise.batch_size) & (whole <= most)
        if rate > 0 and allowed.any():
            at = np.broadcast_arrays(local, micro - 1)
            joint = JointGoodput(profile.step_time, profile.noise, rate, overlap=profile.overlap)
            best = max(best, float(np.max(joint.goodput(nodes, workers, at[0][allowed], at[1][allowed]))))
    return best


if __name__ == "__main__":
    main()
