"""Step 1: the same loop, offloaded. Eight lines change (marked `# 1`); the model, the loss and the data set stay.

`from_torch` runs the data set's own `__getitem__` on every CPU of the cluster. The loop now runs on as many workers as there
are GPUs, and goes on where it left off when it is started again.
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision import transforms
from torchvision.datasets import ImageFolder

import offload  # 1
from offload.demo_data import make_demo_data

TRANSFORM = transforms.Compose(
    [transforms.Resize((96, 96)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
)


def build_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 5, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 5, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, 10),
    )


def train(ctx):
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)  # 1
    for _epoch in ctx.epochs(3):  # 1
        for batch in ctx.batches("train"):  # 1
            loss = cross_entropy(model(batch["image"]), batch["label"])
            ctx.backward(loss)  # 1
            ctx.step()  # 1
        ctx.report(loss=loss)  # 1


def build():
    data = make_demo_data(Path("runs/tutorial-data"), images=1000)
    source = offload.from_torch(ImageFolder(str(data.train), TRANSFORM))
    return offload.Trainer(train, datasets={"train": source}, batch_size=64)  # 1


if __name__ == "__main__":
    print(build().fit().summary())
