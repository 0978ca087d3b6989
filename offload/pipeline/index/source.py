"""The parts of a source, an index of samples and a reader that any preprocessing task can call on index rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from offload.pipeline.blocks.wire import Columns
from offload.pipeline.index.rows import IndexRows, whole
from offload.pipeline.order.shuffling import Draws, Groups


@dataclass
class Samples:
    """A reader's result for some index rows. ``columns`` holds one entry per row. ``errors`` maps the number of an unreadable row to
    its error; such a row holds None in list columns. ``annotated``: the type of the boxes, masks or key points of torchvision that a column
    held before they became arrays, by its name."""

    columns: Columns
    errors: dict[int, str] = field(default_factory=dict)
    annotated: Mapping[str, str] = field(default_factory=dict)


At = Callable[[int], None]
"""A callback with the number of the row that a reader is about to read, so that a watch can name a slow sample."""


def nowhere(row: int) -> None:
    """Ignore the start of a row."""


class Reader(ABC):
    """A reader of a source's index rows. It travels to every preprocessing process once.

    A process calls :meth:`prepare` once. For each task, it calls :meth:`begin_pass` and :meth:`begin`, then :meth:`read` for some rows of
    the task at a time. A reader overrides those hooks that it needs.
    """

    members_vary = False
    """Whether samples may lack columns that others have. Such a source may be mixed with one that has more columns."""

    @property
    def pickled_dataset(self) -> Any:
        """The user's data set that travels with the reader; None if there is none, or if each process makes its own. Where it cannot be
        pickled, the message names the part that cannot."""
        return None

    def prepare(self) -> None:  # noqa: B027  # most readers need none of these hooks
        """Do what a process must do before its first read."""

    def begin_pass(self, seed: int, epoch: int) -> None:  # noqa: B027
        """Learn what the reader's own random numbers may depend on, before each task."""

    def begin(self, rows: pa.Table, epoch: int) -> None:  # noqa: B027
        """Learn which index rows a task will read, in their order, so that the reader can read ahead."""

    @abstractmethod
    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        """Return the samples of these index rows, in their order. Calls ``at`` with the number of each row before reading it."""

    @abstractmethod
    def describe(self, rows: pa.Table, row: int) -> str:
        """The user's name for this sample: its path, or its place in a file."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """All samples of a source. Row ``i`` of ``rows`` is the sample with ``sample_id`` ``i``, in every epoch and run.

    ``groups``: for each sample, the unit that storage reads at once (None: every sample is its own unit). ``draws``: the draws of a
    pass that does not visit every sample once. ``identity`` is equal for indexes with the same samples in the same order. With None, a
    resumed run compares the number of samples alone.
    """

    name: str
    rows: IndexRows
    reader: Reader
    groups: Groups | None = None
    classes: tuple[str, ...] = ()
    draws: Draws | None = None
    identity: str | None = None

    def __len__(self) -> int:
        """The number of samples of a pass."""
        return len(self.rows) if self.draws is None else self.draws.number

    @property
    def table(self) -> pa.Table:
        """The rows of all samples as one table, which may take much memory."""
        return whole(self.rows)


Tell = Callable[[str], None]
"""A callback for the progress of a listing, in words: ``12,000 files``."""


def silent(text: str) -> None:
    """Ignore progress."""


class Lister(Protocol):
    """A function that lists a source. It calls ``tell`` now and then, from another thread if ``aside``.

    A lister of image files may also take ``encoded=True``: its samples then hold
    :class:`offload.pipeline.images.region_decode.EncodedImage`, of which the transform decodes what it needs.
    """

    def __call__(self, tell: Tell = silent) -> Index:
        """Return the index. Raises ConfigError if the source cannot be listed."""
