"""Rows `offload-1-host` and `offload-2-hosts`: offload as its quickstart shows it, on the same samples as every row."""

import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray.train
import torch

import offload
from benchmarks import tables
from benchmarks.rows import protocol
from benchmarks.rows.dataloader import Samples
from benchmarks.rows.ray_script import TRAIN_RESOURCE


def train(ctx: offload.Context) -> None:
    """The consumer of every row, on offload's batches."""
    task = protocol.Task(**ctx.config["task"])
    nothing = torch.zeros((), requires_grad=True)

    def trained() -> None:
        ctx.backward(nothing)
        ctx.step()

    ctx.prepare(torch.nn.Linear(1, 1))
    result = protocol.consume(task, lambda: ctx.batches("train"), trained=trained)
    result = replace(result, extra={"fit_to_first_batch_s": result.first_batch_at_s - ctx.config["launched"]})
    Path(ctx.config["answer"]).write_text(json.dumps(asdict(result)))


def data(task: protocol.Task) -> offload.Pipeline:
    """The samples of a task."""
    if task.workload in tables.NAMES:
        return offload.parquet(protocol.folder(task), tables.TRANSFORMS[task.workload])
    return offload.from_torch(Samples(task))


def run(task: protocol.Task, source: Any) -> None:
    """Train on these samples, and answer."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        # No CPU for the worker: its host has one core, which should preprocess.
        scaling = ray.train.ScalingConfig(resources_per_worker={"CPU": 0, TRAIN_RESOURCE: 1})
        offload.Trainer(
            train,
            datasets={"train": source},
            workers=1,
            batch_size=task.batch_size,
            scaling_config=scaling,
            train_loop_config={"task": asdict(task), "launched": time.monotonic(), "answer": str(answer)},
        ).fit(run_dir=Path(folder) / "run", quiet=True)
        protocol.answer(protocol.Result(**json.loads(answer.read_text())))


def main() -> None:
    task = protocol.parse()
    run(task, data(task))


if __name__ == "__main__":
    main()
