"""Step 1: the same loop, offloaded. This step adds or changes eight lines (marked `# 1`). It removes two: DataLoader's import and
zero_grad, which ctx.step() now does. The model, the loss and the data set stay.

`from_torch` runs the data set's own `__getitem__` on every CPU of the cluster. The loop now runs on one worker per GPU. If you
start it again after an interruption, it resumes where it left off.
"""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision import transforms
from torchvision.datasets import ImageFolder

import offload  # 1
from offload.demo_data import make_demo_data

DATA = Path("runs/tutorial-data")
TRANSFORM = transforms.Compose(
    [transforms.Resize((96, 96)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
)


def dataset():
    return ImageFolder(str(make_demo_data(DATA, images=1000).train), TRANSFORM)


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


def train(ctx):  # 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)  # 1
    for epoch in ctx.epochs(3):  # 1
        for images, labels in ctx.batches("train", "image", "label"):  # 1
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            ctx.backward(loss)  # 1
            ctx.step()  # 1
        print(f"epoch {epoch + 1}  loss {loss.item():.3f}")


if __name__ == "__main__":
    offload.Trainer(train, datasets={"train": offload.from_torch(dataset())}, batch_size=64).fit()  # 1
