"""The random numbers of preprocessing: seeded for every sample or chunk, and whether anybody draws them."""

from __future__ import annotations

import ctypes
import pickle
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
    """Whether anybody has drawn random numbers since this object was made, of libraries that were loaded then. It costs 15 to 60 µs.
    ``held``: the transform's generators."""

    def __init__(self, held: Held = ()) -> None:
        self._held, self._torch = held, sys.modules.get("torch")
        self._opencv = "cv2" in sys.modules
        # A normal number of np.random that waits may be drawn without a change of its generator.
        self._whole = bool(np.random.get_state(legacy=False)["has_gauss"])
        self._before = self._states()

    def __bool__(self) -> bool:
        # OpenCV does not tell the state of its generator.
        return self._opencv or self._states() != self._before

    def _states(self) -> tuple[Any, ...]:
        of_torch = None if self._torch is None else self._torch.default_generator.get_state().numpy().tobytes()
        return random.getstate(), _numpy_state(whole=self._whole), of_torch, states_of(self._held)


def _numpy_state(*, whole: bool) -> bytes:
    """The state of np.random's generator. ``whole``: with a normal number that waits."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if whole or type(generator) is not np.random.MT19937:
        return pickle.dumps(np.random.get_state(legacy=False))
    # NumPy's own way to this state takes 30 µs.
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


_MT19937_BYTES = 625 * 4  # 624 words, and the place of the next
