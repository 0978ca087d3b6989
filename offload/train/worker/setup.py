"""The driver's settings for every worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from offload.model.batch_split import BatchSplit
from offload.pipeline.describe.pipeline import CollateFn, OnDevice
from offload.pipeline.work.environment import WorkingFolder
from offload.train.checkpoints.storage import Marker
from offload.train.config import Adaptation, BatchSize, Checkpoints, Precision
from offload.train.hub.client import HubClient


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """What a worker calls of the user's, and the user's own settings. They travel together, since they may share globals."""

    train: Callable[[Any], None]
    on_device: dict[str, tuple[OnDevice, ...]]
    collate_fn: dict[str, CollateFn]
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The driver's settings for a worker."""

    hub: HubClient
    split: BatchSplit
    batch_size: BatchSize
    adaptation: Adaptation
    sized: dict[str, int | None]
    classes: dict[str, tuple[str, ...]]
    resumable: dict[str, bool]
    ordered: dict[str, bool]
    checkpoints: Checkpoints
    precision: Precision
    seed: int
    hang_s: float
    deterministic: bool
    config: dict[str, Any] = field(default_factory=dict)
    on_device: dict[str, tuple[OnDevice, ...]] = field(default_factory=dict)
    collate_fn: dict[str, CollateFn] = field(default_factory=dict)
    folder: WorkingFolder = field(default_factory=lambda: WorkingFolder(""))
    """That of the program, from which the function's relative paths begin on a node that has it."""
    marker: Marker | None = None
    source: str | None = None
    yielded: frozenset[str] = frozenset()
    """The data sets whose samples a generator yields: any number for each input."""
    drop_last: bool = False
    """Whether training passes leave out batches that are not full, unless the loop says otherwise."""
    varied: frozenset[str] = frozenset()
    """The data sets of which each pass has an order and random numbers of its own. Passes over others are alike."""

    def joined(self, functions: UserFunctions) -> WorkerSetup:
        """The settings with the user's part, which arrives beside them."""
        return replace(self, on_device=functions.on_device, collate_fn=functions.collate_fn, config=functions.config)
