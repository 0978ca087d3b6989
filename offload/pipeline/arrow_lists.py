"""Arrow's lists of numbers as arrays of the numbers' own type."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def as_arrays(lists: pa.Array) -> list[NDArray[Any]] | None:
    """An array for each list, or for each list of lists of one length. The arrays can be written to.

    A missing float is NaN. None for lists of other things, for missing lists, for other missing numbers, and for lists whose own lists
    differ in length.
    """
    kind = lists.type
    fixed = pa.types.is_fixed_size_list(kind)
    if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or lists.null_count:
        return None
    inner = lists.flatten()
    ends = np.arange(len(lists) + 1) * kind.list_size if fixed else lists.offsets.to_numpy() - lists.offsets[0].as_py()
    places = list(itertools.pairwise(ends.tolist()))
    of = inner.type
    if pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_boolean(of):
        if inner.null_count and not pa.types.is_floating(of):
            return None
        numbers = np.array(inner.to_numpy(zero_copy_only=False))  # a copy: those of Arrow cannot be written to
        return [numbers[start:stop] for start, stop in places]
    rows = as_arrays(inner)
    if not rows or any(len({row.shape for row in rows[start:stop]}) > 1 for start, stop in places):
        return None
    return [np.stack(rows[start:stop]) if stop > start else rows[0][:0] for start, stop in places]
