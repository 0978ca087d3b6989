"""One of the runs of :mod:`benchmarks.arbitrated_runs`: paced preprocessing, and paced accelerators.

    python benchmarks/jobs/arbitrated_run.py FOLDER SETTINGS

SETTINGS is a JSON object, see :class:`Settings`. Preprocessing sleeps instead of computing, so that two cores can stand for many. Each
batch is recorded in FOLDER/log, with its samples, and in FOLDER/marks.jsonl, with its time.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch

import offload
from offload.paced import PacedAccelerator
from tests.emulation.history import log_batch

WORKER_CPUS = 0.25  # that a worker takes beside its accelerator


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run trains, and on which terms.

    Args:
        name: its name on the cluster.
        samples: of its one epoch.
        batch_size: the global batch, which stays.
        core_s: seconds of a preprocessing core for a sample.
        alpha_s, beta_s: a worker's seconds for a step, and for each sample of it.
        workers: the least and the most.
        arbiter: whether the cluster's arbiter shares the cluster.
        weight, priority: for the arbiter.
        every_s: seconds between two checkpoints.
    """

    name: str
    samples: int
    batch_size: int
    core_s: float
    alpha_s: float
    beta_s: float
    workers: tuple[int, int]
    arbiter: bool = False
    weight: float = 1.0
    priority: int = 0
    every_s: float = 30.0


class Sleeping(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of which each takes its time on a core."""

    def __init__(self, samples: int, core_s: float) -> None:
        self.samples, self.core_s = samples, core_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        time.sleep(self.core_s)
        return {"x": torch.tensor([number / self.samples, 1.0])}


def train(ctx: Any) -> None:
    folder = Path(ctx.config["folder"])
    accelerator = PacedAccelerator(ctx.config["alpha_s"], ctx.config["beta_s"])
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, folder / "log")
            accelerator.step(len(batch["x"]))
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
            mark = {"at": time.time(), "rank": ctx.rank, "workers": ctx.world_size, "samples": ctx.rows}
            with open(folder / "marks.jsonl", "a", encoding="utf-8") as marks:
                marks.write(json.dumps(mark) + "\n")


def main() -> None:
    folder, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    (folder / "log").mkdir(parents=True)
    least, most = settings.workers
    offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Sleeping(settings.samples, settings.core_s))},
        batch_size=settings.batch_size,
        workers=(least, most) if least < most else least,
        checkpoints=offload.Checkpoints(every_s=settings.every_s),
        cluster=offload.Cluster(arbiter=settings.arbiter, weight=settings.weight, priority=settings.priority),
        scaling_config=ray.train.ScalingConfig(use_gpu=True, resources_per_worker={"CPU": WORKER_CPUS, "GPU": 1}),
        train_loop_config={"folder": str(folder), "alpha_s": settings.alpha_s, "beta_s": settings.beta_s},
    ).fit(run_dir=folder / settings.name, address="auto", quiet=True)


if __name__ == "__main__":
    main()
