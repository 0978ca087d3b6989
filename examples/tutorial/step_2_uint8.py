"""Step 2: ship bytes, and let `offload run` start it. Changed lines are marked `# 2`.

offload gets the folder and the transform separately. So it can use a faster decoder and split the transform: resizing runs on the
CPUs and ends in uint8; ToTensor and Normalize run on the device. Only a quarter of the bytes travel. Batches are dicts of tensors
that are already on the device. ctx.report averages its values over the workers; the run shows and records them.

    offload run examples/tutorial/step_2_uint8.py
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision import transforms

import offload
from offload.demo_data import make_demo_data

DATA = Path("runs/tutorial-data")
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
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(3):
        for batch in ctx.batches("train"):  # 2
            loss = cross_entropy(model(batch["image"]), batch["label"])  # 2
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)  # 2


def build():  # 2
    data = make_demo_data(DATA, images=1000)  # 2
    source = offload.image_folder(data.train, TRANSFORM)  # 2
    return offload.Trainer(train, datasets={"train": source}, batch_size=64)  # 2


if __name__ == "__main__":
    print(build().fit().summary())  # 2
