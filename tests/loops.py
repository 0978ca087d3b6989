"""Training functions that several tests share. `conftest.py` sends this module by value: Ray's workers cannot import the tests."""

from __future__ import annotations

import torch

import offload


def one_epoch(ctx: offload.Context) -> None:
    """Train a linear model on the column ``x``, of one number a row, for an epoch."""
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
