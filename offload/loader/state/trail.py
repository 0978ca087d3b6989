"""The checksum of the batches that a sampler has drawn in an epoch.

Nobody can tell from outside what a sampler's order depends on. But a resumed epoch draws its first batches again, and their checksum shows
whether the order is the same.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from array import array
from collections import deque
from typing import Any

import numpy as np
import torch


class Trail:
    """The checksums of an epoch's first batches, for each number of batches that the program may have had by now.

    ``batches``, ``checksum``: where the trail begins. A checksum is None if an index is an object that this module does not know.
    """

    def __init__(self, batches: int = 0, checksum: int | None = 0) -> None:
        self._first = self._last = batches
        self._checksums: dict[int, int | None] = {batches: checksum}

    def add(self, indices: Any, got: int) -> None:
        """Add the next batch of the order. ``got``: the batches that the program has had, before which nobody will ask for a checksum."""
        checksum = _add(self._checksums[self._last], indices)
        self._last += 1
        self._checksums[self._last] = checksum
        while self._first < min(got, self._last):
            del self._checksums[self._first]
            self._first += 1

    def after(self, batches: int) -> int | None:
        """The checksum of this number of batches."""
        return self._checksums.get(batches)


def _add(checksum: int | None, indices: Any) -> int | None:
    if checksum is None:
        return None
    try:
        return zlib.crc32(_content(indices), checksum)
    except (TypeError, ValueError):
        return None


def _content(indices: Any) -> bytes:
    if type(indices) is list:  # nearly always of integers, perhaps many: this takes a tenth of the time of JSON
        with contextlib.suppress(TypeError, OverflowError):
            return b"%d:" % len(indices) + array("q", indices).tobytes()
    return _as_text(indices).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic | array):
        return value.tolist()
    if isinstance(value, deque | range):
        return list(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value))


_as_text = json.JSONEncoder(default=_plain).encode
