"""The training of `ray_before.py` with offload: the Dataset and its functions stay as they are.

offload run examples/migrate/ray_after.py
"""

import numpy as np
import ray.data
import torch

import offload


def features(batch):
    x = batch["id"] / 256
    return {"x": x.astype(np.float32), "y": (3 * x - 1).astype(np.float32)}


def train(ctx):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def build():
    return offload.Trainer(
        train,
        train_loop_config={"epochs": 2},
        datasets={"train": ray.data.range(256).map_batches(features)},
        workers=(1, 2),
        batch_size=32,
    )


if __name__ == "__main__":
    print(build().fit().summary())
