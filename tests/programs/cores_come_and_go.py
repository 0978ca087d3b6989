"""Run by test_autoscaling.py, in namespaces of its own: a training run on a Ray cluster with an autoscaler. The accelerator is slow,
then fast, then slow again. Prints the run's events, each pass's samples and how many nodes there were."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import ray
import ray.train
import torch

import offload
from offload.report.run_dir import read_lines
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Numbers
from tests.programs.autoscaled import PLACE, NodeCount, start

SAMPLES, BATCH = 160, 16
FAST = range(2, 18)
EPOCHS = 23
# So long that a busy machine adds little to them.
SAMPLE_S = 0.05  # of a core: 20 samples/s
FAST_S, SLOW_S = 0.2, 1.1  # of a step: 80 and 14.5 samples/s
INTERVAL_S = 5.0
NODES = {"cpu": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 6}}


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    changes = Path(ctx.config["changes"])
    for epoch in ctx.epochs(EPOCHS):
        with changes.open("a") as file:
            file.write(json.dumps({"at": time.time(), "fast": epoch in FAST}) + "\n")
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]))
            time.sleep(FAST_S if epoch in FAST else SLOW_S)
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


def main(folder: Path, version: int) -> None:
    log = folder / "log"
    log.mkdir()
    start(folder, version=version, types=NODES)
    count = NodeCount()
    result = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers(SAMPLES, seconds=SAMPLE_S))},
        batch_size=BATCH,
        workers=1,
        adaptation=offload.Adaptation(interval_s=INTERVAL_S),
        cluster=offload.Cluster(preprocessing_cores=(1, 14)),
        checkpoints=offload.Checkpoints(every_epochs=100),
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5, **PLACE}),
        train_loop_config={"log": str(log), "changes": str(folder / "changes.jsonl")},
    ).fit(run_dir=folder / "run", quiet=True)
    passes = each_pass(read_history(log))
    print(
        json.dumps(
            {
                "status": result.status,
                "right": passes == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)},
                "events": read_lines(folder / "run" / "events.jsonl"),
                "nodes": count.seen,
                "epochs": read_lines(folder / "changes.jsonl"),
            }
        )
    )
    ray.shutdown()  # the rest ends with the namespace of its processes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
