"""What a source is: an index of samples, and a reader that any preprocessing task can call on rows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.pipeline.wire import Columns


@dataclass
class Samples:
    """What a reader made of some index rows. ``columns`` holds one entry per row; a row in ``errors`` could not be read
    and has None there in list columns (its number → what was wrong)."""

    columns: Columns
    errors: dict[int, str] = field(default_factory=dict)


At = Callable[[int], None]


def nowhere(row: int) -> None:
    """Ignore the start of a row."""


class Reader(Protocol):
    """Reads rows of a source's index. Travels to every preprocessing process once."""

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        """The samples of these index rows, in their order. Calls ``at`` with the number of each row that it begins."""

    def describe(self, rows: pa.Table, row: int) -> str:
        """The user's name for this sample: its path, or its place in a file."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """All samples of a source. Row ``i`` of ``table`` is the sample with ``sample_id`` ``i``, in every epoch and run.

    ``groups``: per sample the unit that storage reads as one (None: each sample is its own).
    """

    name: str
    table: pa.Table
    reader: Reader
    groups: NDArray[np.int64] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)


Tell = Callable[[str], None]
"""How far a listing is, in words: ``12,000 files``."""


def silent(text: str) -> None:
    """Ignore progress."""


class Lister(Protocol):
    """Lists a source. ``tell`` is called now and then; from another thread, where ``aside``."""

    def __call__(self, tell: Tell = silent) -> Index:
        """The index. Raises ConfigError if there is none."""
