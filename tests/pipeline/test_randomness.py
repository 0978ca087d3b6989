"""Whether anybody has drawn random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offload.pipeline.preprocessing.randomness import Drawn, seed_generators

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, normal": np.random.randn,
    "numpy, one of a pair": lambda: np.random.randint(0, 2, dtype=np.int8),
    "torch": lambda: torch.rand(1),
}


@pytest.fixture(autouse=True)
def without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV's generator tells no state; tests of this process may have imported it."""
    monkeypatch.delitem(sys.modules, "cv2", raising=False)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_draw_is_noticed(draw: Callable[[], Any]) -> None:
    seed_generators(5)
    for _ in range(4):  # every other normal number is one that waits, and changes no generator
        drawn = Drawn()
        assert not drawn
        draw()
        assert drawn


def test_another_generator_of_numpy_is_watched_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        drawn = Drawn()
        assert not drawn
        np.random.rand()
        assert drawn
    finally:
        np.random.set_bit_generator(before)
