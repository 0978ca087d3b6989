"""Chunks of a pass: runs of positions whose samples draw their random numbers together, whoever makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from offload.pipeline.calls import CHUNK
from offload.pipeline.ranges import Ranges

TRAINED = "__trained__"
"""A column of index rows that exists where a resume cuts a chunk: True for rows that were trained before. The task processes them
with the rest of their chunk, since only a whole chunk draws the same random numbers, but does not return them."""


def whole_chunks(positions: Ranges, n: int) -> Ranges:
    """Every position below ``n`` in the chunks of these positions."""
    whole = [(start // CHUNK * CHUNK, min(-(-stop // CHUNK) * CHUNK, n)) for start, stop in positions.pairs]
    return Ranges.of_all([Ranges(tuple(whole))])


def untrained(rows: pa.Table) -> np.ndarray[Any, Any]:
    """The numbers of the index rows that a task returns: all but those marked as :data:`TRAINED`."""
    if TRAINED not in rows.column_names:
        return np.arange(rows.num_rows)
    return np.flatnonzero(~rows.column(TRAINED).to_numpy())
