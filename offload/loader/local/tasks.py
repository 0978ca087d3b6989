"""What the program and its preprocessing processes say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from offload.loader.batch_recipe import BatchOrder, FinishedBatches
from offload.pipeline.pool.task import Cost


@dataclass(frozen=True, kw_only=True)
class MakeBatches:
    """Make these batches of a map-style data set."""

    orders: list[BatchOrder]


@dataclass(frozen=True, kw_only=True)
class BeginReading:
    """Begin to read an iterable data set, as this worker, with the epoch's seed. It has no answer."""

    worker: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ReadOn:
    """Read up to this many batches of the iterable data set."""

    most: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The process is prepared."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """The batches of a task. ``ended``: an iterable data set has no more."""

    block: FinishedBatches
    cost: Cost
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Slow:
    """``what`` has already taken this many seconds."""

    what: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class NotPrepared:
    """The process could not be prepared, for this reason."""

    reason: str
