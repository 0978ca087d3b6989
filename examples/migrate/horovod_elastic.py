"""What Horovod Elastic does, with offload: workers come and go, and training goes on from the last commit.

offload run examples/migrate/horovod_elastic.py --address auto
"""

import torch

import offload


class Points(torch.utils.data.Dataset):
    """Points on a line."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        x = torch.tensor([i / 256])
        return x, 3 * x - 1


def train(ctx):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(2):
        for x, y in ctx.batches("train", "x", "y"):
            loss = torch.nn.functional.mse_loss(model(x), y)
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def build():
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Points(), columns=("x", "y"))},
        batch_size=32,
        workers=(1, 4),
        checkpoints=offload.Checkpoints(every_s=60),
    )


if __name__ == "__main__":
    print(build().fit().summary())
