"""Claim: ASHA ends poor trials of a ConvNet early, and gives their time to better ones.

The claim is that of *Getting Started with Distributed Machine Learning with PyTorch and Ray* (2021). The article tunes learning rate
and momentum with Ray Tune. The search space, the scheduler and ``Tuner`` are Ray's. Each trial is a run of offload: it preprocesses on
every CPU of the cluster, and gives them back once Tune ends it:

    python examples/articles/convnet_asha.py                             # four trials on digits that scikit-learn ships
    RAY_ADDRESS=head:6379 python examples/articles/convnet_asha.py --mnist ROOT --trials 30 --epochs 10    # torchvision's MNIST in ROOT

With ``offload arbiter start`` on that cluster, trials share its cores by their goodput. Without, the next one waits for the one before.

Measured: a search with ``--trials 8`` (two busy cores, no GPU, two and a half minutes). Its trials trained 16 epochs of the 32 that eight
whole trials have. The best, with lr 0.1 and momentum 0.28, is right on 86 % of the test digits.
"""

import argparse
from pathlib import Path

import numpy as np
import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import offload


class Digits(torch.utils.data.Dataset):
    """Scans of handwritten digits, 28×28, turned a little."""

    def __init__(self, mnist: str | None, *, training: bool) -> None:
        self.turn = v2.RandomAffine(10) if training else v2.Identity()
        if mnist is not None:
            from torchvision.datasets import MNIST

            part = MNIST(mnist, train=training)
            self.images, self.labels = part.data.numpy(), part.targets.numpy()
        else:
            from sklearn.datasets import load_digits

            digits, half = load_digits(), slice(0, 1400) if training else slice(1400, None)
            images = torch.from_numpy(digits.images[half])[:, None] * (255 / 16)
            self.images = nn.functional.interpolate(images, (28, 28), mode="bilinear")[:, 0].to(torch.uint8).numpy()
            self.labels = digits.target[half].astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, item: int):
        return {"image": self.turn(torch.from_numpy(self.images[item])[None]), "label": self.labels[item]}


class ConvNet(nn.Sequential):
    """One convolution, one linear layer."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 3, 3), nn.MaxPool2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(192, 10))


def train(ctx: offload.Context) -> None:
    """Train one configuration. Reports the accuracy on the test digits after each epoch."""
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["lr"], momentum=ctx.config["momentum"])
    model, optimizer = ctx.prepare(model, optimizer)
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            ctx.backward(cross_entropy(model(batch["image"]), batch["label"]))
            ctx.step()
        with torch.no_grad():
            for batch in ctx.batches("test"):
                right = (model(batch["image"]).argmax(1) == batch["label"]).sum()
                ctx.accumulate(right=right, rows=len(batch["label"]))
        sums = ctx.accumulated()
        ctx.report(accuracy=sums["right"] / sums["rows"])


def build(config) -> offload.Trainer:
    """The training of one configuration."""
    parts = {
        name: offload.from_torch(
            Digits(config["mnist"], training=name == "train"), on_device=offload.Normalize(0.13, 0.31)
        )
        for name in ("train", "test")
    }
    return offload.Trainer(train, datasets=parts, batch_size=64, train_loop_config=config)


def search(trials: int, epochs: int, mnist: str | None) -> tune.ResultGrid:
    """Run the trials, two at a time at most."""
    space = {
        "lr": tune.choice([0.001, 0.01, 0.1]),
        "momentum": tune.uniform(0.1, 0.9),
        "mnist": mnist,
        "epochs": epochs,
    }
    tuner = tune.Tuner(
        offload.tune.trainable(build),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=trials,
            max_concurrent_trials=2,
            reuse_actors=True,
            scheduler=ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="convnet_asha", storage_path=str(Path("runs").absolute()), verbose=1),
    )
    return tuner.fit()


def main() -> tune.ResultGrid:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="the root folder of torchvision's MNIST, already there")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4, help="of the best trials")
    args = parser.parse_args()
    ray.init(ignore_reinit_error=True, include_dashboard=False)
    results = search(args.trials, args.epochs, args.mnist)
    for result in sorted(results, key=lambda result: -result.metrics["accuracy"]):
        epochs = result.metrics["training_iteration"]
        print(
            f"lr {result.config['lr']:<5}  momentum {result.config['momentum']:.2f}  {epochs} epoch(s)  {result.metrics['accuracy']:.3f}"
        )
    return results


if __name__ == "__main__":
    main()
