"""Claim: a ResNet trains on when hosts come and go, and its workers may double over time.

The claim is that of *Elastic Deep Learning with Horovod on Ray* (2021). Elastic Horovod asks its user for host discovery,
requests for resources and a decorated state; callbacks steer it. Here the run discovers hosts by itself and commits between steps. It
takes a schedule of workers, and tells callbacks what it does:

    offload run examples/articles/elastic_resnet.py --cpus-per-worker 0.5    # one worker, and two from the second epoch on
    offload run examples/articles/elastic_resnet.py --address auto -- --workers 1 8         # as many as the cluster's hosts allow
    offload run examples/articles/elastic_resnet.py --address auto -- --data CIFAR --depth 3 --epochs 90 --schedule 0:2 30:4 60:8

CIFAR is a folder of class folders. With ``--max-batch-size``, the global batch follows the measured goodput, and learning rates follow it.

Measured (first command with ``-- --images 600``, two busy cores, no GPU): one worker trained the first epoch, two the second. Each epoch
trained all 480 samples once. Commits took 0.1 s. The resize stopped training for 14 s beside other programs; docs/elastic.md says 3 s.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import offload
from offload.train.callback import Checkpoint, Decision, Ended, Interval, Started

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1, bias=False)),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet(depth: int, classes: int) -> nn.Module:
    """A residual network for images of 32 pixels, with ``depth`` blocks in each of three stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for before, channels in ((16, 16), (16, 32), (32, 64)):
        layers.append(Block(before, channels, 1 if channels == 16 else 2))
        layers.extend(Block(channels, channels, 1) for _ in range(depth - 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Hosts(offload.Callback):
    """Says which hosts train and preprocess, and what the run decides about them."""

    def started(self, started: Started) -> None:
        hosts = ", ".join(f"{node['name']} ({node['cpus']:g} CPUs, {node['gpus']:g} GPUs)" for node in started.nodes)
        print(f"{'resumed' if started.resumed else 'started'} on {hosts}: {started.workers} worker(s)")
        self.cores = started.preprocessing_cores

    def interval(self, interval: Interval) -> None:
        if interval.preprocessing_cores != self.cores:
            print(f"step {interval.step}: {self.cores} → {interval.preprocessing_cores} preprocessing core(s)")
            self.cores = interval.preprocessing_cores

    def decision(self, decision: Decision) -> None:
        if decision.kind != "keep":
            print(f"{decision.kind}: {decision.reason}")

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        print(f"step {checkpoint.step}: committed in {checkpoint.seconds:.1f} s ({checkpoint.reason})")

    def ended(self, ended: Ended) -> None:
        print(f"{ended.status} after {ended.summary.get('samples', 0):,} samples")


def train(ctx: offload.Context) -> None:
    model = resnet(ctx.config["depth"], len(ctx.info().class_names)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["lr"], momentum=0.9, weight_decay=1e-4)
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            logits = model(batch["image"])
            loss = cross_entropy(logits, batch["label"])
            ctx.backward(loss)
            ctx.step()
            ctx.accumulate(right=(logits.argmax(1) == batch["label"]).sum(), rows=ctx.rows)
        sums = ctx.accumulated()
        ctx.report(loss=loss, accuracy=sums["right"] / sums["rows"], workers=ctx.world_size, rows=sums["rows"])


def build() -> offload.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder of class folders; by default, a small one is generated")
    parser.add_argument("--images", type=int, default=1000, help="the number of generated images")
    parser.add_argument("--depth", type=int, default=1, help="blocks in each stage")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
    parser.add_argument("--max-batch-size", type=int, help="lets the global batch grow")
    parser.add_argument("--workers", type=int, nargs=2, metavar=("LEAST", "MOST"), help="decisions follow the goodput")
    parser.add_argument(
        "--schedule", nargs="+", default=["0:1", "1:2"], metavar="EPOCH:WORKERS", help="without --workers"
    )
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    if args.data is None:
        from offload.demo_data import make_demo_data

        args.data = str(make_demo_data(Path(f"runs/articles-data/{args.images}"), images=args.images).train)
    schedule = None if args.workers else {int(epoch): int(n) for epoch, n in (e.split(":") for e in args.schedule)}
    augment = v2.Compose(
        [
            *(v2.RandomResizedCrop(32, scale=(0.5, 1.0)), v2.ToImage()),
            *(v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)),  # these two on the device
        ]
    )
    return offload.Trainer(
        train,
        datasets={"train": offload.image_folder(args.data, augment)},
        workers=tuple(args.workers) if schedule is None else (min(schedule.values()), max(schedule.values())),
        batch_size=offload.BatchSize(initial=args.batch_size, max=args.max_batch_size),
        adaptation=offload.Adaptation(schedule=schedule),
        callbacks=[Hosts()],
        train_loop_config={"depth": args.depth, "epochs": args.epochs, "lr": args.lr},
    )


if __name__ == "__main__":
    print(build().fit().summary())
