"""A small convolutional model of JPEGs: ``offload predict CHECKPOINT predicted.py -o OUTPUT -- FOLDER``.

With a second argument, the model waits at its fifth batch until a file of that name exists. Parts are written after every task.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms import v2

import offload
from offload.inference import parts

TRANSFORM = v2.Compose(
    [v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
)
calls = 0


def build_model() -> torch.nn.Module:
    """A convolution and a linear layer."""
    layers = (torch.nn.Conv2d(3, 4, 5, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))


def outputs(model: torch.nn.Module, batch: Any) -> Any:
    """The outputs, in the end."""
    global calls
    calls += 1
    while calls == 5 and len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    return model(batch["image"])


def data(folder: str | Path, **options: Any) -> offload.Pipeline:
    """The images of a folder with the preprocessing of validation."""
    return offload.image_folder(folder, TRANSFORM, **options)


def predictor() -> offload.Predictor:
    """What `offload predict` calls."""
    parts.FLUSH_S = 0.0
    return offload.Predictor(build_model, data(sys.argv[1]), outputs=outputs, keep=("label",))
