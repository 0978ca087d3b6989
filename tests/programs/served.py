"""A small model of JPEGs to serve. A process of it ends when it finds the file ``OFFLOAD_TEST_ENDS/preprocessing`` or ``.../model``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms import v2

import offload
from tests.programs.predicted import build_model


class EndsOnce:
    """A step that ends its process if this file exists, which it removes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, image: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
            os._exit(1)
        return image


def predictor(images: Path, ends: Path) -> offload.Predictor:
    """The model, with a step that may end a process on each side."""
    transform = v2.Compose(
        [
            v2.Lambda(EndsOnce(ends / "preprocessing")),
            v2.Resize((16, 16)),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    return offload.Predictor(build_model, offload.image_folder(images, transform, on_device=EndsOnce(ends / "model")))
