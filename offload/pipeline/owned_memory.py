"""Writable views of object store memory.

Ray hands its memory out as read-only, but every row of a block has exactly one reader, which may do with it what it likes. torch has no
read-only tensors: an in-place operation on a read-only mapping would crash the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload import forks


class _OwnedMemory:
    """The memory of an array, as NumPy's array interface describes it, but writable. It keeps the array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._owner = array
        address = array.__array_interface__["data"][0]
        forks.keeps(self)  # Ray must not hear of the end of a fork's copy
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as a writable array."""
    return array if array.flags.writeable else np.asarray(_OwnedMemory(array))
