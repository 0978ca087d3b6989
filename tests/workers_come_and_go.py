"""Run by test_autoscaling.py, in namespaces of its own: on a Ray cluster with an autoscaler that has no room for a worker at first, a
training run that is worth two workers. Prints the run's events, each pass's samples and how many nodes there were."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch

import offload
from offload.report.run_dir import read_lines
from offload.testing.history import each_pass, log_batch, read_history
from tests.autoscaled import NodeCount, start

SAMPLES, BATCH = 480, 16
EPOCHS = 9
WORKER = {"machine": 1}  # what a worker reserves, and no node has at first
STEP_SAMPLE_S, STEP_S = 0.03, 0.02
NODES = {"worker": {"resources": {"CPU": 0, **WORKER}, "node_config": {}, "min_workers": 0, "max_workers": 2}}


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full(2, i / SAMPLES, dtype=np.float32)}


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]))
            time.sleep(STEP_S + STEP_SAMPLE_S * len(batch["x"]))
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


def main(folder: Path, version: int) -> None:
    log = folder / "log"
    log.mkdir()
    start(folder, version=version, types=NODES)
    count = NodeCount()
    result = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers())},
        batch_size=BATCH,
        workers=(1, 2),
        adaptation=offload.Adaptation(autoscale_workers=True, interval_s=5.0),
        checkpoints=offload.Checkpoints(every_epochs=100),
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0, **WORKER}),
        train_loop_config={"log": str(log)},
    ).fit(run_dir=folder / "run", quiet=True)
    passes = each_pass(read_history(log))
    print(
        json.dumps(
            {
                "status": result.status,
                "right": passes == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)},
                "events": read_lines(folder / "run" / "events.jsonl"),
                "nodes": count.seen,
            }
        )
    )
    ray.shutdown()  # the rest ends with the namespace of its processes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
