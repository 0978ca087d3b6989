"""A run to look at while it trains: decisions, checkpoints, and numbers that change. It exports metrics for Prometheus.

offload run tests/programs/live_run.py -- PORT EPOCHS
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch

import offload
from offload.callbacks import Prometheus

SAMPLES = 15_000
SAMPLE_S = 0.0012  # of a core's time for a sample
STEP_S, PER_SAMPLE_S = 0.02, 0.0004  # what an accelerator would take for a step


class Busy(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples that keep a core busy. Their noise is worth a larger batch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        until = time.thread_time() + SAMPLE_S
        while time.thread_time() < until:
            pass
        noise = np.random.default_rng(index).normal(size=2)
        return {"x": np.float32(noise[0]), "y": np.float32(noise[0] + 5 * noise[1])}


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    for epoch in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            loss = ((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2).mean()
            time.sleep(STEP_S + PER_SAMPLE_S * len(batch["x"]))
            ctx.backward(loss)
            ctx.step()
        print(f"the model has seen epoch {epoch + 1}")
        ctx.report(loss=float(loss))


def build() -> offload.Trainer:
    port, epochs = int(sys.argv[1]), int(sys.argv[2])
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Busy())},
        batch_size=offload.BatchSize(initial=16, max=128),
        callbacks=[Prometheus(port)],
        train_loop_config={"epochs": epochs},
    )
