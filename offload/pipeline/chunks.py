"""Chunks of a pass: runs of positions whose samples draw their random numbers together, whoever makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from offload.pipeline.calls import CHUNK

TRAINED = "__trained__"
"""A column of index rows that exists where a resume cuts a chunk: True for rows that were trained before. The task processes them
with the rest of their chunk, since only a whole chunk draws the same random numbers, but does not return them."""


def whole_chunks(positions: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    """Every position below ``n`` in the chunks of these ascending positions."""
    numbers = positions // CHUNK
    chunks = numbers[np.diff(numbers, prepend=-1) > 0]
    whole = (chunks[:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)
    return whole[whole < n]


def untrained(rows: pa.Table) -> np.ndarray[Any, Any]:
    """The numbers of the index rows that a task returns: all but those marked as :data:`TRAINED`."""
    if TRAINED not in rows.column_names:
        return np.arange(rows.num_rows)
    return np.flatnonzero(~rows.column(TRAINED).to_numpy())
