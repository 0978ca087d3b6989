"""Run by test_autoscaling.py, in namespaces of its own: on a Ray cluster with an autoscaler that has no room for a worker at first, a
training run that is worth two workers, until its input is slow. Prints the run's events, whether each pass's samples are right and how
many nodes there were.

    python -m tests.programs.workers_come_and_go FOLDER AUTOSCALER_VERSION "two workers train"|"a node was given back"

The run ends once that has happened.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

import offload
from offload.report.run_dir import read_lines
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Numbers
from tests.helpers import eventually
from tests.programs.autoscaled import NodeCount, start

SAMPLES, BATCH = 160, 16
EPOCHS = 1000  # more than it will come to
WORKER = {"machine": 1}  # what a worker reserves, and no node has at first
STEP_SAMPLE_S, STEP_S = 0.03, 0.02
SAMPLE_S, SLOW_SAMPLE_S = (
    0.02,
    0.1,
)  # of each of the head's two cores: 100 and 20 samples/s, where a worker can train 32
IDLE_S = 60.0  # nothing holds a node that came until the worker that it is for starts: half a minute on a busy machine
DEADLINE_S = 800.0
GIVEN_BACK = "a node was given back"
NODES = {"worker": {"resources": {"CPU": 0, **WORKER}, "node_config": {}, "min_workers": 0, "max_workers": 2}}


class SlowAtTimes(Numbers):
    """Slower while a file exists."""

    def __init__(self, slow: Path) -> None:
        super().__init__(SAMPLES)
        self.slow = slow

    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(SLOW_SAMPLE_S if self.slow.exists() else SAMPLE_S)
        return super().__getitem__(i)


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]))
            time.sleep(STEP_S + STEP_SAMPLE_S * len(batch["x"]))
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
        if ctx.sum(Path(ctx.config["done"]).exists()):  # whoever has seen it: all end together
            return


def conduct(events: Path, count: NodeCount, slow: Path, done: Path, *, give_back: bool) -> None:
    """Let the run end once two workers train; with ``give_back``, make its input slow then, and wait until a node was given back."""
    eventually(lambda: events.exists() and '"resized"' in events.read_text(), DEADLINE_S)
    if give_back:
        slow.touch()
        eventually(lambda: count.seen[-1][1] == 1, DEADLINE_S)
    done.touch()


def main(folder: Path, version: int, until: str) -> None:
    log, slow, done = folder / "log", folder / "slow", folder / "done"
    log.mkdir()
    start(folder, version=version, types=NODES, idle_s=IDLE_S)
    count = NodeCount()
    events = folder / "run" / "events.jsonl"
    threading.Thread(
        target=conduct, args=(events, count, slow, done), kwargs={"give_back": until == GIVEN_BACK}, daemon=True
    ).start()
    result = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(SlowAtTimes(slow))},
        batch_size=BATCH,
        workers=(1, 2),
        adaptation=offload.Adaptation(interval_s=5.0),
        cluster=offload.Cluster(autoscale_workers=True),
        checkpoints=offload.Checkpoints(every_epochs=100),
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0, **WORKER}),
        train_loop_config={"log": str(log), "done": str(done)},
    ).fit(run_dir=folder / "run", quiet=True)
    passes = each_pass(read_history(log))
    print(
        json.dumps(
            {
                "status": result.status,
                "right": passes == {epoch: Counter(range(SAMPLES)) for epoch in range(len(passes))},
                "events": read_lines(events),
                "nodes": count.seen,
            }
        )
    )
    ray.shutdown()  # the rest ends with the namespace of its processes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
