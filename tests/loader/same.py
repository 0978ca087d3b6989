"""Equality of batches of any structure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any, *, strides: bool = True) -> bool:
    """Whether two batches are equal in structure, types and elements, and in the layout of tensors if ``strides``."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        layout = not strides or a.stride() == b.stride()
        return a.dtype == b.dtype and a.shape == b.shape and layout and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], strides=strides) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(one, other, strides=strides) for one, other in zip(a, b, strict=True))
    return bool(a == b)
