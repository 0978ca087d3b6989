"""What the checks train: a small convolutional network on images that it learns in a few steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import offload
from benchmarks.gpu.place import Place

CLASSES, SIDE = 4, 16


class Stripes(torch.utils.data.Dataset[Any]):
    """Noisy images with a bright band; where it lies is the class."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = np.random.default_rng(i).normal(scale=0.3, size=(3, SIDE, SIDE)).astype(np.float32)
        label, band = i % CLASSES, SIDE // CLASSES
        image[:, label * band : (label + 1) * band] += 1.0
        return {"image": image, "label": np.int64(label)}


def network() -> torch.nn.Module:
    """Two convolutions and a linear layer."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * (SIDE // 2) ** 2, CLASSES),
    )


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector, on the CPU."""
    return torch.cat([each.detach().flatten().float().cpu() for each in model.parameters()])


def fit(
    place: Place, train: Callable[[offload.Context], None], *, name: str, **given: Any
) -> tuple[Any, offload.Result]:
    """Train, and return what rank 0 wrote to ``ctx.config["answer"]``, and the result. ``given``: arguments of the Trainer."""
    answer = place.folder / f"{name}.json"
    config = {"answer": str(answer), **given.pop("train_loop_config", {})}
    trainer = offload.Trainer(train, train_loop_config=config, **given)
    result = trainer.fit(run_dir=place.folder / name, quiet=True)
    return (json.loads(answer.read_text()) if answer.exists() else None), result


def answer(ctx: offload.Context, document: Any) -> None:
    """Write the answer of a run, on rank 0."""
    if ctx.rank == 0:
        Path(ctx.config["answer"]).write_text(json.dumps(document))
