"""Claim: a training on MNIST that is rescaled or restarted loses neither its place in the data nor its sums.

The claim is that of *AdaptDL on Ray: Simple and Efficient Distributed Training* (2022). The article converts PyTorch's MNIST program:
loaders that know their place, epochs that count on, batches that grow, and an accumulator over all replicas. Here these are
``ctx.batches``, ``ctx.epochs``, ``BatchSize`` and ``ctx.accumulate``:

    offload run examples/articles/mnist_restart_safe.py                            # handwritten digits that scikit-learn ships
    offload run examples/articles/mnist_restart_safe.py --run-dir runs/real -- --mnist ROOT --epochs 14    # torchvision's MNIST in ROOT

End it with Ctrl-C or ``kill -9`` at any time. The same command goes on with exactly the samples that the last checkpoint lacks.

Measured (first command with ``-- --epochs 2``, two busy cores, no GPU): ended by ``kill -9`` within the first epoch, it went on at step 37,
after 2,368 of 2,800 samples. Both epochs took 44 steps and 2,800 samples, as without the kill. The reported accuracy of the first one is a
number of hits among all 2,800.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import offload


class Digits(torch.utils.data.Dataset):
    """Scans of handwritten digits, 28×28. Each time that a sample is read, it is turned and moved a little."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, samples: int | None = None, *, training: bool) -> None:
        self.images, self.labels = images, labels
        self.samples = samples or len(images)
        self.augment = v2.RandomAffine(10, translate=(0.1, 0.1)) if training else v2.Identity()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, item: int):
        image = torch.from_numpy(self.images[item % len(self.images)])[None]
        return {"image": self.augment(image), "label": self.labels[item % len(self.images)]}


class Net(nn.Sequential):
    """Two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10)),
        )


def train(ctx: offload.Context) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    for _epoch in ctx.epochs(ctx.config["epochs"]):  # a restarted run begins in the epoch where it was
        model.train()
        for batch in ctx.batches("train"):  # and at its first untrained sample
            logits = model(batch["image"])
            loss = cross_entropy(logits, batch["label"])
            ctx.backward(loss)
            ctx.step()
            ctx.accumulate(loss=loss.detach() * ctx.rows, right=hits(logits, batch), rows=ctx.rows)
        scheduler.step()
        test(ctx, model)
        sums = ctx.accumulated()  # over all replicas, and over the part of the epoch before a restart
        ctx.report(
            loss=sums["loss"] / sums["rows"],
            accuracy=sums["right"] / sums["rows"],
            test_accuracy=sums["test_right"] / sums["test_rows"],
        )


@torch.no_grad()
def test(ctx: offload.Context, model: nn.Module) -> None:
    model.eval()
    for batch in ctx.batches("test"):
        ctx.accumulate(test_right=hits(model(batch["image"]), batch), test_rows=len(batch["label"]))


def hits(logits: torch.Tensor, batch) -> torch.Tensor:
    return (logits.argmax(1) == batch["label"]).sum()


def scans(mnist: str | None):
    """The images (uint8, 28×28) and labels for training and for the test."""
    if mnist is not None:
        from torchvision.datasets import MNIST

        parts = [MNIST(mnist, train=training) for training in (True, False)]
        return [(part.data.numpy(), part.targets.numpy()) for part in parts]
    from sklearn.datasets import load_digits

    digits = load_digits()
    enlarged = nn.functional.interpolate(
        torch.from_numpy(digits.images)[:, None] * (255 / 16), (28, 28), mode="bilinear"
    )
    images, labels = enlarged[:, 0].to(torch.uint8).numpy(), digits.target.astype(np.int64)
    return [(images[:1400], labels[:1400]), (images[1400:], labels[1400:])]


def build() -> offload.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="the root folder of torchvision's MNIST, already there")
    parser.add_argument("--samples", type=int, help="of an epoch; by default 2,800 of the small data, and all of MNIST")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2, help="the most; the least is 1")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    (images, labels), (test_images, test_labels) = scans(args.mnist)
    samples = args.samples or (2 * len(images) if args.mnist is None else None)
    normalize = offload.Normalize(0.13, 0.31)
    return offload.Trainer(
        train,
        datasets={
            "train": offload.from_torch(Digits(images, labels, samples, training=True), on_device=normalize),
            "test": offload.from_torch(Digits(test_images, test_labels, training=False), on_device=normalize),
        },
        batch_size=offload.BatchSize(initial=args.batch_size, max=args.max_batch_size, local=(32, 256)),
        workers=(1, args.workers),
        checkpoints=offload.Checkpoints(every_s=2.0, best="test_accuracy"),
        train_loop_config={"epochs": args.epochs, "lr": args.lr},
    )


if __name__ == "__main__":
    print(build().fit().summary())
