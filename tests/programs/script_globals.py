"""A training script as they are: module-level settings, classes and singletons that its functions use, and that come back in batches.

``python -m tests.programs.script_globals RUN_DIR`` iterates over loaders, then trains. It ends with code 0 if everything was as in torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.backends.cudnn as cudnn
from torch import nn

import offload

from . import class_kinds
from .travelling import lazily

parser = argparse.ArgumentParser()
parser.add_argument("run_dir")
args = parser.parse_args()
logger = logging.getLogger(__name__)
lazy = lazily("wave")
best_acc1 = 0


class WrongError(ValueError):
    """An exception of the script."""


class Level(enum.Enum):
    """What its samples hold."""

    LOW = 1
    HIGH = 2


class Sample(NamedTuple):
    """A sample."""

    x: torch.Tensor
    level: Level


@dataclasses.dataclass
class Settings:
    """What it stores beside the model."""

    lr: float


class Batch:
    """A batch of a class that counts its instances, in the process that makes them."""

    made = 0

    def __init__(self, samples: list[Sample]) -> None:
        self.x = torch.stack([each.x for each in samples])
        self.level = samples[0].level
        Batch.made += 1


@functools.lru_cache
def scale(level: Level) -> float:
    """A function of the script with a cache."""
    return float(level.value)


class Numbers(torch.utils.data.Dataset[Sample]):
    """Sixteen samples; ``broken`` has none, if it is there."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Sample:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        assert lazy.open
        if i == self.broken:
            raise WrongError(f"sample {i}")
        return Sample(torch.full((2,), i / scale(Level.HIGH)), Level.HIGH)


class Nested(Numbers):
    """Samples of a class in the body of another module's class."""

    def __getitem__(self, i: int) -> Any:
        return class_kinds.Data.Item(i, torch.ones(1))


class Stream(torch.utils.data.IterableDataset[Sample]):
    """An iterable data set that fails in its middle."""

    def __iter__(self) -> Iterator[Sample]:
        yield from (Numbers()[i] for i in range(4))
        raise WrongError("the end")


def collate(samples: list[Sample]) -> Batch:
    """Make a batch, as a function that sets a switch of torch's."""
    from . import class_kinds as kinds

    assert kinds.Data is class_kinds.Data
    cudnn.deterministic = True
    logger.debug("collating")
    return Batch(samples)


def first(samples: list[Any]) -> Any:
    """The first sample."""
    return samples[0]


def train(ctx: offload.Context) -> None:
    """Train, with a switch of torch's and a global that it assigns."""
    global best_acc1
    cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    layer = nn.Linear(2, 1)
    model, _ = ctx.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            assert type(batch) is Batch
            assert batch.level is Level.HIGH
            best_acc1 += 1
            ctx.backward(model(batch.x).mean())
            ctx.step()
        ctx.report(best=best_acc1)
    torch.save({"settings": Settings(lr=0.01), "best": best_acc1}, ctx.config["path"])


def main() -> None:
    """Iterate, then train."""
    loader: Any
    loader = offload.DataLoader(Numbers(), batch_size=4, collate_fn=collate)
    found = [batch for _ in range(2) for batch in loader]
    assert {type(each) for each in found} == {Batch}
    assert {each.level for each in found} == {Level.HIGH}
    assert Batch.made == 0, "the processes' class has replaced the program's"
    for dataset, kind in ((Numbers(), Sample), (Nested(), class_kinds.Data.Item)):
        loader = offload.DataLoader(dataset, batch_size=4, collate_fn=first)
        assert {type(each) for each in loader} == {kind}
    failed = []
    for failing in (Numbers(broken=5), Stream()):
        loader = offload.DataLoader(failing, batch_size=4, collate_fn=collate)
        try:
            assert all(type(batch) is Batch for batch in loader)
        except WrongError as error:
            failed.append(type(error))
    assert failed == [WrongError, WrongError]
    data = {"train": offload.from_torch(Numbers(), collate_fn=collate)}
    path = f"{args.run_dir}.pt"
    config = {"path": path}
    offload.Trainer(train, datasets=data, batch_size=4, workers=1, train_loop_config=config).fit(run_dir=args.run_dir)
    stored = torch.load(path, weights_only=False)
    assert (type(stored["settings"]), stored["best"]) == (Settings, 4)


if __name__ == "__main__":
    main()
    sys.exit(0)
