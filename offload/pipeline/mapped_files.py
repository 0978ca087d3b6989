"""Memory maps of files on their way to other processes: the name of the file travels, and each process maps it.

NumPy pickles the content of a map. A data set over a file of tokens would be read into memory as a whole, and each process would keep a
copy of its own, where processes that torch forks share the map.
"""

from __future__ import annotations

import io
import mmap
import os
from typing import Any

import numpy as np
from ray import cloudpickle

from offload.errors import RunError

LARGE_BYTES = 64 << 20  # smaller maps travel with their content: nodes that do not see the file can use them

_Place = tuple[str, Any, int, tuple[int, ...], str]
"""The arguments of :func:`_mapped`."""


def dumps(value: Any) -> bytes:
    """The pickle of a value that may hold memory maps. Raises what pickling raises for objects that cannot be sent."""
    written = io.BytesIO()
    _Pickler(written, protocol=5).dump(value)  # type: ignore[no-untyped-call]
    return written.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.memmap and (place := _place(obj)) is not None:
            return _mapped, place
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


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
