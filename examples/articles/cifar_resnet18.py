"""Claim: one parameter takes a ResNet-18 on CIFAR-10 from one worker to several.

The claim is that of *Getting Started with Distributed Machine Learning with PyTorch and Ray* (2021). The article uses RaySGD, the
ancestor of Ray Train. Its parameter ``num_workers`` is ``--workers`` here. Preprocessing takes every core that the workers leave:

    offload run examples/articles/cifar_resnet18.py        # 32×32 crops of generated images, a narrow network, one worker
    offload run examples/articles/cifar_resnet18.py --cpus-per-worker 0.5 --run-dir runs/two -- --workers 2
    offload run examples/articles/cifar_resnet18.py --run-dir runs/real -- --data CIFAR --width 64 --epochs 90 --workers 8

CIFAR is a folder with train/<class>/<name>.png and test/<class>/<name>.png.

Measured (first command, and the second; two busy cores, no GPU): the one worker and the two took 16 steps of the same global batch. Both
trained 960 samples, each once an epoch. Two workers on two cores are no faster than one: for that, each needs a GPU of its own.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import offload

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet18(width: int, classes: int) -> nn.Module:
    """ResNet-18 for images of 32 pixels, with ``width`` channels in its first stage (64: as published)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(before, channels, stride), Block(channels, channels, 1)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def train(ctx: offload.Context) -> None:
    model = resnet18(ctx.config["width"], len(ctx.info().class_names)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["lr"], momentum=0.9, weight_decay=5e-4)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        model.train()
        for batch in ctx.batches("train"):
            with ctx.autocast():
                loss = cross_entropy(model(batch["image"]), batch["label"])
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss, test_accuracy=accuracy(ctx, model))


@torch.no_grad()
def accuracy(ctx: offload.Context, model: nn.Module) -> float:
    """The accuracy on the test images, of which each worker sees its own part."""
    model.eval()
    right = rows = 0
    for batch in ctx.batches("test"):
        right += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
        rows += len(batch["label"])
    return ctx.sum(right) / ctx.sum(rows)


def build() -> offload.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with train/ and test/; by default, a small one is generated")
    parser.add_argument("--images", type=int, default=600, help="the number of generated images")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage (64: as published)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args()
    if args.data is None:
        from offload.demo_data import make_demo_data

        made = make_demo_data(Path(f"runs/articles-data/{args.images}"), images=args.images)
        folders = {"train": str(made.train), "test": str(made.val)}
    else:
        folders = {part: f"{args.data.rstrip('/')}/{part}" for part in ("train", "test")}
    to_floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]  # on the device
    augment = v2.Compose([v2.RandomResizedCrop(32, scale=(0.5, 1.0)), *to_floats])
    resize = v2.Compose([v2.Resize((32, 32)), *to_floats])
    return offload.Trainer(
        train,
        datasets={
            "train": offload.image_folder(folders["train"], augment),
            "test": offload.image_folder(folders["test"], resize),
        },
        workers=args.workers,
        batch_size=args.batch_size,
        precision=args.precision,
        train_loop_config={name: vars(args)[name] for name in ("epochs", "lr", "width")},
    )


if __name__ == "__main__":
    print(build().fit().summary())
