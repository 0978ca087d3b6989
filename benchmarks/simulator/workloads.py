"""Random jobs with price tables, and a few typical ones. All randomness comes from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.simulator.job import HubCost, Job
from offload.model import Catalog, GradientNoise, NodeType, StepTime
from offload.prices import built_in

MOST_CORES = 10_000
CORES_PER_GPU = 64
"""The most cores of CPU nodes for each GPU that anyone considers."""
PRICE_SPREAD = 0.25
"""Standard deviation of the logarithm of a price, around the built-in catalog's."""
SPEED_SPREAD = 0.03
"""The same of a node type's true cores, around the catalog's."""
FAMILIES = {
    "NVIDIA A10G": ("ml.g5.xlarge", "ml.g5.2xlarge", "ml.g5.4xlarge", "ml.g5.8xlarge", "ml.g5.12xlarge", "ml.g5.48xlarge"),
    "NVIDIA L4": ("ml.g6.xlarge", "ml.g6.2xlarge", "ml.g6.4xlarge", "ml.g6.8xlarge", "ml.g6.12xlarge"),
    "NVIDIA L40S": ("ml.g6e.xlarge", "ml.g6e.2xlarge", "ml.g6e.12xlarge"),
    "NVIDIA V100": ("ml.p3.2xlarge", "ml.p3.8xlarge", "ml.p3.16xlarge"),
    "NVIDIA A100": ("ml.p4d.24xlarge",),
    "NVIDIA H100": ("ml.p5.48xlarge",),
}  # fmt: skip
HELPERS = (
    "ml.c5.4xlarge", "ml.c5.9xlarge", "ml.c5.18xlarge", "ml.c6i.4xlarge", "ml.c6i.8xlarge", "ml.c6i.24xlarge", "ml.c7i.8xlarge",
    "ml.c7i.24xlarge", "ml.m5.4xlarge", "ml.m5.24xlarge",
)  # fmt: skip

Spot = Literal["none", "cpu", "all"]
Objective = Literal["cost", "time"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to rent for a job: so many GPUs on nodes of one of these types, and CPU nodes of at most one of those.

    ``catalog`` holds prices as policies see them; the true speeds of nodes are the job's.
    """

    name: str
    job: Job
    catalog: Catalog
    gpus: int
    hosts: tuple[NodeType, ...]
    helpers: tuple[NodeType, ...]
    spot: Spot = "none"
    objective: Objective = "cost"

    @property
    def catalog_interruptions(self) -> dict[str, float]:
        """Interruptions of a spot node per hour by the name of its type, as the catalog guesses them."""
        return {kind.name: float(kind.interruptions_per_hour or 0.0) for kind in (*self.hosts, *self.helpers)}

    def most_helpers(self, helper: NodeType) -> int:
        """Nodes of this type: those of ``MOST_CORES``, or of ``CORES_PER_GPU`` for each GPU."""
        return min(MOST_CORES, CORES_PER_GPU * self.gpus) // helper.vcpus


def random_question(seed: int, *, hub: bool = False) -> Question:
    """A random job on 8 to 1,024 GPUs, with at most 10,000 cores of CPU nodes, and a random price table."""
    rng = np.random.default_rng([seed, 46])
    device = str(rng.choice(list(FAMILIES)))
    gpus = int(2 ** rng.integers(3, 11))
    types = built_in()
    hosts = [types[name] for name in FAMILIES[device] if gpus % types[name].gpus == 0]
    chosen = rng.choice(len(hosts), size=min(len(hosts), 2), replace=False)
    picked = [hosts[i] for i in sorted(chosen)]
    others = [types[name] for name in rng.choice(HELPERS, size=2, replace=False)]
    priced = {kind.name: _priced(kind, rng) for kind in (*picked, *others)}
    # One GPU's rate at a usual local batch, and the cores that would keep it busy.
    rate, local = 10 ** rng.uniform(1.5, 3.3), int(2 ** rng.integers(4, 9))
    fixed = rng.uniform(0.02, 0.3)
    step_s = local / rate
    sync_s = step_s * 10 ** rng.uniform(-1.5, 0.0)
    near = min((kind.vcpus - kind.gpus) / kind.gpus for kind in picked)
    most = near + min(MOST_CORES / gpus, CORES_PER_GPU)
    cores_per_gpu = min(near * 10 ** rng.uniform(-0.3, 1.3), 1.3 * most)
    initial = gpus * local
    adaptive = rng.random() < 0.5
    scale = initial * 10 ** rng.uniform(-0.5, 1.5)
    job = Job(
        core_seconds=cores_per_gpu / rate,
        wire_bytes=float(
            min(10 ** rng.uniform(3.5, 6.0), 0.1 * 1e9 * max(picked[0].network_gbps / picked[0].gpus, 1) / rate)
        ),
        step=StepTime(
            alpha_compute=fixed * step_s,
            beta_compute=(1 - fixed) / rate,
            alpha_intra=0.5 * sync_s,
            alpha_inter=sync_s,
            beta_inter=sync_s * 1e-4,
            gamma=float(rng.uniform(1.0, 8.0)),
            variation=float(rng.uniform(0.01, 0.08)),
        ),
        noise=GradientNoise(sqr=1 / scale, var=1 / initial, batch_size=initial) if adaptive else None,
        batches=(initial, initial * 8 if adaptive else initial),
        max_local_batch=2 * local,
        ingest_samples_per_s=rate * 10 ** rng.uniform(0.3, 1.5),
        task_variation=float(rng.uniform(0.03, 0.3)),
        link_share=float(rng.uniform(0.75, 0.95)),
        speeds={name: math.exp(SPEED_SPREAD * rng.standard_normal()) for name in priced},
        # The catalog's rate is a guess of the true one.
        interruptions_per_hour={
            name: float(kind.interruptions_per_hour or 0.0) * math.exp(0.5 * rng.standard_normal())
            for name, kind in priced.items()
        },
        restart_s=float(rng.uniform(6, 30)),
        replacement_s=float(rng.uniform(120, 600)),
        hub=HubCost() if hub else None,
    )
    spot: Spot = "none" if rng.random() < 0.5 else "cpu" if rng.random() < 0.6 else "all"
    return Question(
        name=f"{seed}",
        job=job,
        catalog=Catalog(priced),
        gpus=gpus,
        hosts=tuple(priced[kind.name] for kind in picked),
        helpers=tuple(priced[kind.name] for kind in others),
        spot=spot,
        objective="cost" if rng.random() < 0.75 else "time",
    )


def _priced(kind: NodeType, rng: np.random.Generator) -> NodeType:
    price = kind.usd_per_hour * math.exp(PRICE_SPREAD * rng.standard_normal())
    return replace(
        kind,
        usd_per_hour=price,
        spot_usd_per_hour=price * float(rng.uniform(0.25, 0.7)),
        interruptions_per_hour=float(0.05 * 10 ** rng.uniform(-0.7, 0.7)),
        burst=False,
    )


def typical(gpus: int) -> list[Question]:
    """Typical jobs on so many GPUs, at the built-in catalog's prices.

    ``blur`` is the published workload (a ViT on an A10G behind ten blurs of an image), as the README's profile has it. ``jpeg`` is
    ResNet-50 on an H100 with the step of ``benchmarks/results/gpu.json`` and its core-seconds. ``augment`` is a made-up one between them.
    """
    types = built_in()
    spec = {
        "blur": ("ml.g5.xlarge", "ml.g5.12xlarge", 0.029, 150_528.0, StepTime(0.01, 0.0016, 0.001, 0.0, 0.004, 0.0, 1.5), 64),
        "augment": ("ml.g5.xlarge", "ml.g5.12xlarge", 0.008, 150_528.0, StepTime(0.01, 0.0026, 0.002, 0.0, 0.02, 0.0, 4.0), 128),
        "jpeg": ("ml.p5.48xlarge", "ml.p5.48xlarge", 0.0018, 150_552.0, StepTime(0.002, 0.000243, 0.001, 0.0, 0.004, 0.0, 4.0), 256),
    }  # fmt: skip
    questions = []
    for name, (small, large, core_seconds, wire, step, local) in spec.items():
        hosts = tuple(types[kind] for kind in dict.fromkeys((small, large)) if gpus % types[kind].gpus == 0)
        helpers = tuple(
            replace(types[kind], spot_usd_per_hour=0.4 * types[kind].usd_per_hour, interruptions_per_hour=0.05)
            for kind in ("ml.c5.4xlarge", "ml.c6i.8xlarge")
        )
        job = Job(
            core_seconds=core_seconds,
            wire_bytes=wire,
            step=replace(step, variation=0.03),
            batches=(gpus * local, gpus * local),
            max_local_batch=2 * local,
            ingest_samples_per_s=30_000.0,
            interruptions_per_hour={kind.name: 0.05 for kind in helpers},
        )
        questions.append(
            Question(
                name=name,
                job=job,
                catalog=Catalog({kind.name: kind for kind in (*hosts, *helpers)}),
                gpus=gpus,
                hosts=hosts,
                helpers=helpers,
                spot="cpu",
            )
        )
    return questions
