"""How two times that overlap add up: the p-norm that both halves of the model use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def overlapped(first: ArrayLike, second: ArrayLike, power: float) -> Floats:
    """``(first^power + second^power)^(1/power)``, elementwise over broadcast arrays of times ≥ 0.

    ``power`` 1 is their sum (nothing overlaps), infinity their maximum (the shorter hides behind the longer).
    Computed relative to the longer time, so that no power overflows.
    """
    a, b = np.broadcast_arrays(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    longer, shorter = np.maximum(a, b), np.minimum(a, b)
    # Where the longer one is 0 or infinite so is the result.
    ratio = np.divide(shorter, longer, out=np.zeros(a.shape), where=(longer > 0) & np.isfinite(longer))
    if np.isinf(power):
        return np.asarray(longer)
    return np.asarray(longer * (1 + ratio**power) ** (1 / power))


def plain(value: Any) -> Any:
    """An array without dimensions as a Python number, any other as it is: scalars in, a scalar out."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else value
