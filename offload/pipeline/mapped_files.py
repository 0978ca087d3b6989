"""Memory maps of files on their way to other processes: the name of the file travels, and each process maps it.

NumPy pickles the content of a map. A data set over a file of tokens would be read into memory as a whole, and each process would keep a
copy of its own, where processes that torch forks share the map.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from offload.errors import RunError

LARGE_BYTES = 64 << 20  # smaller maps travel with their content: nodes that do not see the file can use them

_Place = tuple[str, Any, int, tuple[int, ...], str]
"""The arguments of :func:`_mapped`."""


def reduced(array: Any) -> Any:
    """Reduce a memory map as ``__reduce__`` does. NotImplemented: its content must travel."""
    place = _place(array)
    return NotImplemented if place is None else (_mapped, place)


def _place(array: Any) -> _Place | None:
    """What of which file the array maps; None if its content must travel. What a writable map holds need not be in the file."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    if array.nbytes < LARGE_BYTES or array.mode != "r" or not contiguous or not os.path.isfile(array.filename or ""):
        return None
    # A view knows where the whole map begins in the file, but not where it begins itself.
    begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.ctypes.data - np.frombuffer(array._mmap, np.uint8).ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    return str(array.filename), array.dtype, begins + inside, array.shape, order


def _mapped(filename: str, dtype: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    try:
        return np.memmap(filename, dtype, "r", offset, shape, order)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{filename!r}, which the data set maps into memory, cannot be mapped on a preprocessing node: {error}. Every node must see "
            "the file under this path. If they cannot, hold its content instead of the map: numpy.array(map)."
        ) from None
