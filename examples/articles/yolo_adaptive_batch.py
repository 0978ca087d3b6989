"""Claim: YOLO trains faster with a batch that adapts than with one that is too small or too large.

The claim is that of *Optimizing Elastic Deep Learning in GPU Clusters with AdaptDL for PyTorch* (2021). The article replaces
loader and model wrapper by AdaptDL's. Here ``BatchSize(initial, max)`` does it: the run measures throughput and gradient noise. It chooses
batch and accumulation by goodput, and lets learning rates follow:

    offload run examples/articles/yolo_adaptive_batch.py                      # up to 256 images
    offload run examples/articles/yolo_adaptive_batch.py -- --max-batch-size 16        # the fixed batch, for comparison
    offload run examples/articles/yolo_adaptive_batch.py --run-dir runs/real -- --pixels 416 --images 100000 --epochs 100 --width 64

The detector has one scale and one box per cell. Its images are drawn: rectangles and ellipses on noise, as many boxes as shapes.

``--paced A B`` adds a paced accelerator: it occupies the worker for A ms a step and B ms a sample, and computes nothing. The small network
still trains on the CPU. Such figures are those of a paced accelerator, not of a GPU.

Measured (first command, and the second, both with ``--epochs 1 --paced 100 0.2``; two busy cores, paced accelerator): the run tried a batch
of 64 for 11 steps, 1.5 times as fast. The gradients' noise made each of its samples worth 0.6 of one, so it went back to 16. It took 113
steps for an epoch of progress, and the fixed batch 125. So short a training gains no time; benchmarks/results has longer ones.
"""

import argparse
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import offload
from offload.paced import PacedAccelerator

STRIDE, CLASSES = 16, 2  # pixels of a cell; rectangles and ellipses


class Shapes(torch.utils.data.Dataset):
    """Images with a few shapes. A sample is the image, and for each cell: whether it holds a shape's centre, the box, the class."""

    def __init__(self, images: int, pixels: int) -> None:
        self.images, self.pixels = images, pixels

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, item: int):
        rng = np.random.default_rng(item)
        image = rng.integers(0, 96, (self.pixels, self.pixels, 3), dtype=np.uint8)
        rows, columns = np.mgrid[: self.pixels, : self.pixels]
        cells = self.pixels // STRIDE
        target = np.zeros((cells, cells, 6), np.float32)  # holds a centre, x, y, width, height, class
        for _ in range(rng.integers(1, 5)):
            width, height = rng.uniform(0.15, 0.4, 2) * self.pixels
            x, y = rng.uniform(width / 2, self.pixels - width / 2), rng.uniform(height / 2, self.pixels - height / 2)
            kind = rng.integers(CLASSES)
            across, down = np.abs(columns - x) / (width / 2), np.abs(rows - y) / (height / 2)
            inside = np.maximum(across, down) <= 1 if kind == 0 else np.hypot(across, down) <= 1
            image[inside] = rng.integers(128, 256, 3)
            column, row = int(x // STRIDE), int(y // STRIDE)
            place = (x / STRIDE - column, y / STRIDE - row)
            target[row, column] = (1, *place, width / self.pixels, height / self.pixels, kind)
        return {"image": image, "target": target}


class Detector(nn.Sequential):
    """Four halvings, then for each cell: one logit, four numbers of a box, and logits of the classes."""

    def __init__(self, width: int) -> None:
        layers: list[nn.Module] = []
        channels = [3, width, 2 * width, 4 * width, 4 * width]
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.1)]
        super().__init__(*layers, nn.Conv2d(channels[-1], 5 + CLASSES, 1))


def detection_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of outputs (N, 5 + classes, cells, cells) and targets (N, cells, cells, 6): boxes and classes count where a shape has its centre."""
    output = output.permute(0, 2, 3, 1)
    holds = target[..., 0] > 0
    objectness = binary_cross_entropy_with_logits(output[..., 0], target[..., 0])
    boxes = mse_loss(output[holds][:, 1:5].sigmoid(), target[holds][:, 1:5])
    return objectness + 5 * boxes + 0.5 * cross_entropy(output[holds][:, 5:], target[holds][:, 5].long())


def train(ctx: offload.Context) -> None:
    model = Detector(ctx.config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["lr"], momentum=0.9)
    model, optimizer = ctx.prepare(model, optimizer)
    accelerator = PacedAccelerator(*(ms / 1000 for ms in ctx.config["paced"]))
    for _epoch in ctx.epochs(ctx.config["epochs"]):  # an epoch ends at the progress of an epoch of initial batches
        for batch in ctx.batches("train"):
            loss = detection_loss(model(batch["image"]), batch["target"])
            ctx.backward(loss)
            accelerator.step(ctx.rows)
            ctx.step()
            ctx.accumulate(loss=loss.detach() * ctx.rows, rows=ctx.rows)
        sums = ctx.accumulated()
        ctx.report(loss=sums["loss"] / sums["rows"])


def build() -> offload.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="of an epoch")
    parser.add_argument("--pixels", type=int, default=96, help=f"a multiple of {STRIDE}")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="the initial global batch")
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--local", type=int, default=64, help="the most images that a device holds")
    parser.add_argument("--workers", type=int, help="by default one per GPU, or one")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument(
        "--paced", type=float, nargs=2, default=(0.0, 0.0), metavar=("A", "B"), help="a paced accelerator"
    )
    args = parser.parse_args()
    shapes = offload.from_torch(Shapes(args.images, args.pixels), on_device=offload.Normalize(0.3, 0.3))
    return offload.Trainer(
        train,
        datasets={"train": shapes},
        batch_size=offload.BatchSize(initial=args.batch_size, max=args.max_batch_size, local=(1, args.local)),
        workers=args.workers,
        adaptation=offload.Adaptation(interval_s=2.0),
        train_loop_config={name: vars(args)[name] for name in ("epochs", "lr", "paced", "width")},
    )


if __name__ == "__main__":
    print(build().fit().summary())
