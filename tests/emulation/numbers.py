"""Small data sets of numbers, in which each sample identifies itself."""

import time
from typing import Any

import numpy as np
import torch


class Numbers(torch.utils.data.Dataset[Any]):
    """A data set whose sample i has ``x``: the number ``i / samples``, ``width`` times. Each sample takes ``seconds`` to make."""

    def __init__(self, samples: int, *, width: int = 2, seconds: float = 0.0) -> None:
        self.samples, self.width, self.seconds = samples, width, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return {"x": np.full(self.width, i / self.samples, dtype=np.float32)}


class Line(torch.utils.data.Dataset[Any]):
    """A data set whose sample i has ``x``: (i, 1) scaled down, and ``y``: 3·x + 1, with normal ``noise`` that is always the same."""

    def __init__(self, samples: int, *, noise: float = 0.0) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, Any]:
        x = i / self.samples
        off = self.noise * np.random.default_rng(i).normal() if self.noise else 0.0
        return {"x": np.array([x, 1.0], dtype=np.float32), "y": np.float32(3 * x + 1 + off)}
