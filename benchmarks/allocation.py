"""How long one decision of the allocation takes, and how near it is to the best bound.

    python benchmarks/allocation.py -o benchmarks/results/allocation.json

Random jobs, half of them input-bound, on nodes of 8 GPUs and 64 cores: up to 1,000 GPUs, 300 jobs, and 11 core levels. Every job choosing
anew is the hardest decision. The bound is that of the relaxation, without whole numbers and without nodes; the distance from it is measured
after the workers have their nodes. Nothing here trains.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import machine, versions
from offload.model import GradientNoise, StepTime
from offload.model.allocation.allocate import decide
from offload.model.allocation.choices import CORE_LEVELS
from offload.model.allocation.counts import cost_of
from offload.model.allocation.values import Job, Rules
from offload.model.placement import NodeResources

SIZES = ((8, 20), (32, 64), (125, 300))  # nodes of 8 GPUs, jobs


def world(nodes: int, jobs: int, seed: int) -> tuple[list[Job], list[NodeResources]]:
    """Random jobs on equal nodes; step times, noise and preprocessing vary by factors of a hundred."""
    draw = random.Random(seed)
    made = [
        Job(
            name=f"job-{i:03}",
            step_times={
                "GPU": StepTime(
                    alpha_compute=10 ** draw.uniform(-3, -1),
                    beta_compute=10 ** draw.uniform(-4, -2),
                    alpha_intra=10 ** draw.uniform(-3, -1.3),
                    beta_intra=1e-3,
                    alpha_inter=10 ** draw.uniform(-2.5, -1),
                    beta_inter=2e-3,
                    gamma=draw.uniform(1, 6),
                )
            },
            noise=GradientNoise(sqr=1e-3 * 10 ** draw.uniform(-1, 1), var=1e-2, batch_size=64),
            max_batch_size=4096,
            local_batch_sizes=(8, 256),
            core_seconds_per_sample=10 ** draw.uniform(-4, -1.5),
            age_s=draw.uniform(0, 10_000),
        )
        for i in range(jobs)
    ]
    return made, [NodeResources(name=f"node-{i:03}", cpus=64, gpus=8, gpu_type="GPU") for i in range(nodes)]


def row(nodes: int, jobs: int, repeats: int) -> dict[str, Any]:
    """Seconds of a first decision and of the next one, and the distance from the bound, over several worlds."""
    first, again, distance, restarts = [], [], [], 0
    for seed in range(repeats):
        made, cluster = world(nodes, jobs, seed)
        began = time.perf_counter()
        decision = decide(made, cluster, Rules())
        first.append(time.perf_counter() - began)
        speedups = np.array([allotment.speedup or 0.0 for allotment in decision.allotments.values()])
        distance.append(float(np.sum(cost_of(speedups, Rules().fairness))) / decision.bound - 1)
        made = [replace(job, present=decision.allotments[job.name].holding) for job in made]
        began = time.perf_counter()
        restarts += sum(a.restarts for a in decide(made, cluster, Rules()).allotments.values())
        again.append(time.perf_counter() - began)
    return {
        "gpus": 8 * nodes,
        "jobs": jobs,
        "core_levels": len(CORE_LEVELS),
        "worlds": repeats,
        "first_decision_s": round(max(first), 2),
        "next_decision_s": round(max(again), 2),
        "distance_from_bound": round(max(distance), 4),
        "restarts_when_nothing_changed": restarts,
    }


@click.command()
@click.option("--repeats", default=3, show_default=True, help="Worlds of each size.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the result.")
def main(repeats: int, output: Path | None) -> None:
    """Time decisions of the allocation and compare them with the best bound."""
    result = {
        "command": shlex.join(["python", "benchmarks/allocation.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": {**versions(), "scipy": scipy.__version__},
        "decisions": [row(nodes, jobs, repeats) for nodes, jobs in SIZES],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
