"""The random numbers of preprocessing: seeded for every sample or chunk, and whether anybody draws them."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from offload.pipeline.held_generators import Held, seed_held, states_of


def seed_generators(seed: int, held: Held = ()) -> None:
    """Seed every generator of augmentation, those of libraries only if they are loaded: importing torch costs seconds. ``held`` are those
    of the transform itself."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setRNGSeed(seed & 0x7FFFFFFF)
    seed_held(held, seed)


def loaded_libraries() -> tuple[bool, bool]:
    """Whether each library that :func:`seed_generators` seeds is loaded."""
    return "torch" in sys.modules, "cv2" in sys.modules


class Drawn:
    """Whether anybody has drawn random numbers since this object was made. It costs some 50 µs. ``held``: the transform's generators."""

    def __init__(self, held: Held = ()) -> None:
        self._held = held
        self._before = self._states()

    def __bool__(self) -> bool:
        # OpenCV does not tell the state of its generator.
        return "cv2" in sys.modules or self._states() != self._before

    def _states(self) -> tuple[Any, ...]:
        return *_states(), states_of(self._held)


def _states() -> tuple[Any, ...]:
    _, key, *rest = np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), key.tobytes(), rest, of_torch  # type: ignore[attr-defined]
