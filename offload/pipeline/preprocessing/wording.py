"""Words for errors about samples: which one it is, what made it, and the user's line that raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.pipeline.blocks.wire import SAMPLE_ID
from offload.uncaught import LIBRARIES

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Words:
    """What messages of a data set say.

    Args:
        describe: the reader's name for a row of index rows; None without a reader.
        transform: the transform's name; empty without one.
        dataset: the data set's name; empty if unknown.
    """

    describe: Callable[[pa.Table, int], str] | None
    transform: str
    dataset: str

    @property
    def of(self) -> str:
        """`` of 'train'``, or nothing."""
        return f" of {self.dataset!r}" if self.dataset else ""

    def sample(self, chunk: pa.Table | None, row: int | None, ids: np.ndarray[Any, Any] | None = None) -> str:
        """The sample of this row of index rows, or else of these ``ids``; without a row, all of them."""
        numbers = (
            chunk.column(SAMPLE_ID).to_pylist() if chunk is not None else (ids.tolist() if ids is not None else [])
        )
        described = self.describe(chunk, row or 0) if self.describe is not None and chunk is not None else ""
        if row is None:
            first = f" (the first is {described})" if described else ""
            return f"a batch of {len(numbers)} samples, {numbers[0]} to {numbers[-1]}{first}"
        return f"sample {numbers[row]}{f' ({described})' if described else ''}"

    def made_by(self, before: str = "") -> str:
        """The origin of a column: the transform, or the data set."""
        if self.transform:
            return f"{before}returned by the transform {self.transform}"
        return "" if before else "of the data set"


def say(error: BaseException) -> str:
    """``ValueError: text (augment, script.py:12)``: the error, and the user's line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ("/offload/pipeline/", "/offload/train/"))]
    # The user's line, not the line inside a library that it called.
    own = [f for f in own if not any(part in f.filename for part in LIBRARIES)] or own
    place = f" ({own[-1].name}, {own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
