"""The training of `benchmarks/convergence.py` and `benchmarks/accuracy_cost.py`: scikit-learn's handwritten digits on photographs, and a
small ResNet.

A digit lies anywhere on a random part of one of the two photographs that scikit-learn ships. So one epoch does not suffice: accuracy
climbs over about ten. The handwriting of the held-out images does not occur in training.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import sklearn.datasets
import torch
from numpy.typing import NDArray

SIZE = 12  # pixels of an image's side
HELD_OUT = 5  # every fifth scan is held out
LOOKS = 3  # images of each held-out scan: more images tell the accuracy more precisely
CONTRAST = (1.2, 2.4)  # of the ink, where the photograph's brightness is in [0, 1]
WIDTH = 8  # channels of the first convolution


@dataclass(frozen=True)
class Images:
    """``images``: float32 of shape (n, 1, SIZE, SIZE), each with mean 0 and deviation 1; ``labels``: int64 of shape (n,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@cache
def pasted_digits(*, held_out: bool) -> Images:
    """Return the images for training, or those held out. They are the same in every process."""
    scans = sklearn.datasets.load_digits()
    photographs = [photo.mean(axis=2) / 255 for photo in sklearn.datasets.load_sample_images().images]
    chosen = (np.arange(len(scans.target)) % HELD_OUT == 0) == held_out
    rng = np.random.default_rng(int(held_out))
    looks = LOOKS if held_out else 1
    ink = np.concatenate([scans.images[chosen] / 16] * looks)
    labels = np.concatenate([scans.target[chosen]] * looks)
    images = np.stack([_pasted(digit, photographs[rng.integers(len(photographs))], rng) for digit in ink])
    return Images(torch.tensor(images[:, None], dtype=torch.float32), torch.tensor(labels, dtype=torch.int64))


def _pasted(digit: NDArray[Any], photograph: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """The digit somewhere on a random part of the photograph at half of its resolution, in lighter or darker ink."""
    top, left = (int(rng.integers(side - 2 * SIZE)) for side in photograph.shape)
    image = photograph[top : top + 2 * SIZE : 2, left : left + 2 * SIZE : 2].copy()
    row, column = (int(rng.integers(SIZE - side + 1)) for side in digit.shape)
    strength = float(rng.uniform(*CONTRAST)) * float(rng.choice([-1, 1]))
    image[row : row + digit.shape[0], column : column + digit.shape[1]] += strength * digit
    normalised: NDArray[Any] = (image - image.mean()) / (image.std() + 1e-3)
    return normalised


class PastedDigits(torch.utils.data.Dataset[Any]):
    """The training images as a data set."""

    def __init__(self) -> None:
        self._data = pasted_digits(held_out=False)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self._data.images[i].numpy(), "label": int(self._data.labels[i])}


class RankNorm(torch.nn.BatchNorm2d):
    """Batch normalisation of several ranks in one forward pass: of equal parts of the batch, one after the other, each with its own
    statistics. Only those of rank 0 enter the running ones, as in a checkpoint that rank 0 writes.

    Attributes:
        ranks: the number of parts.
    """

    ranks = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` of shape (ranks · rows, channels, height, width)."""
        if not self.training or self.ranks == 1:
            return super().forward(x)
        rows, channels, height, width = x.shape
        parts = x.view(self.ranks, rows // self.ranks, channels, height, width)
        with torch.no_grad():
            super().forward(parts[0])
        side_by_side = parts.transpose(0, 1).reshape(-1, self.ranks * channels, height, width)
        scale, shift = self.weight.repeat(self.ranks), self.bias.repeat(self.ranks)
        normal = torch.nn.functional.batch_norm(side_by_side, None, None, scale, shift, True, 0.0, self.eps)
        return normal.view(-1, self.ranks, channels, height, width).transpose(0, 1).reshape(x.shape)


class _Block(torch.nn.Module):
    """A residual block that halves the sides and changes the channels."""

    def __init__(self, before: int, channels: int, norm: type[torch.nn.BatchNorm2d]) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(before, channels, 3, stride=2, padding=1, bias=False)
        self.first_norm = norm(channels)
        self.second = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = norm(channels)
        self.shortcut = torch.nn.Conv2d(before, channels, 1, stride=2, bias=False)
        self.shortcut_norm = norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut_norm(self.shortcut(x)))


def resnet(seed: int, norm: type[torch.nn.BatchNorm2d] = torch.nn.BatchNorm2d) -> torch.nn.Sequential:
    """Return the model with the initial weights of this seed."""
    with _BUILDING:
        return _resnet(seed, norm)


_BUILDING = threading.Lock()  # ranks may be threads, which share one generator of random numbers


def _resnet(seed: int, norm: type[torch.nn.BatchNorm2d]) -> torch.nn.Sequential:
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), norm(WIDTH), torch.nn.ReLU(),
        _Block(WIDTH, 2 * WIDTH, norm), _Block(2 * WIDTH, 4 * WIDTH, norm),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4 * WIDTH, 10),
    )  # fmt: skip
    torch.random.set_rng_state(generator)
    return model


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    """Return the optimizer; its learning rate changes with the epochs (:func:`set_rate`)."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)


DECAYS = (0.6, 0.85)  # shares of the epochs after which the learning rate falls to a tenth


def set_rate(optimizer: torch.optim.Optimizer, rate: float, share: float) -> None:
    """Set the learning rate for this share of the training: ``rate`` at first."""
    for group in optimizer.param_groups:
        group["lr"] = rate * 0.1 ** sum(share >= at for at in DECAYS)


def accuracy(model: torch.nn.Module) -> float:
    """The share of the held-out images that the model classifies correctly."""
    data = pasted_digits(held_out=True)
    model.eval()
    with torch.no_grad():
        right = (model(data.images).argmax(1) == data.labels).float().mean()
    model.train()
    return float(right)
