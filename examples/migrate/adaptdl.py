"""What AdaptDL's PyTorch API does, with offload: batches that grow, workers that come and go, sums over an epoch.

offload run examples/migrate/adaptdl.py
"""

import torch

import offload


class Points(torch.utils.data.Dataset):
    """Points on a line."""

    def __len__(self):
        return 1024

    def __getitem__(self, i):
        x = torch.tensor([i / 1024])
        return {"x": x, "y": 3 * x - 1}


def train(ctx):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    for _epoch in ctx.epochs(3):
        for batch in ctx.batches("train"):
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            ctx.backward(loss)
            ctx.step()
            ctx.accumulate(loss=loss.detach() * ctx.rows, rows=ctx.rows)
        scheduler.step()
        sums = ctx.accumulated()
        ctx.report(loss=sums["loss"] / sums["rows"])


def build():
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Points())},
        batch_size=offload.BatchSize(initial=32, max=256, local=(8, 64)),
        workers=(1, 2),
    )


if __name__ == "__main__":
    print(build().fit().summary())
