"""The driver's settings for every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload.model.batch_split import BatchSplit
from offload.pipeline.describe.pipeline import CollateFn, OnDevice
from offload.pipeline.feed.passes import PassRequest
from offload.pipeline.program.surroundings import Program
from offload.train.checkpoints.storage import Marker, Storage
from offload.train.config import Adaptation, BatchSize, Checkpoints, Precision
from offload.train.hub.client import HubClient
from offload.train.messages import TRAIN
from offload.train.worker.data.cutting import TokenBudget, budget_of


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """What a worker calls of the user's, and the user's own settings. They travel together, since they may share globals."""

    train: Callable[[Any], None]
    on_device: dict[str, tuple[OnDevice, ...]]
    collate_fn: dict[str, CollateFn]
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DatasetSetup:
    """The driver's settings for one data set.

    Args:
        samples: the number of its samples; None if unknown.
        class_names: the classes of an image folder, in the order of the labels; None for other sources.
        resumable: whether its samples have stable ids, so that a pass can go on where it stopped.
        ordered: whether blocks come in the order of the pass.
        yielded: whether a generator yields its samples: any number for each input.
        varied: whether each pass has an order and random numbers of its own. Otherwise, all passes are alike.
        on_device: the user's functions of each batch on the device.
        collate_fn: the user's function that makes a batch of samples, if there is one.
    """

    samples: int | None
    class_names: tuple[str, ...] | None = None
    resumable: bool
    ordered: bool
    yielded: bool = False
    varied: bool = False
    on_device: tuple[OnDevice, ...] = ()
    collate_fn: CollateFn | None = None

    @property
    def delivered(self) -> int | None:
        """The number of samples that a pass delivers; None if only the pass tells."""
        return None if self.yielded else self.samples

    @property
    def budget(self) -> TokenBudget | None:
        """The limit of a batch beside its number of rows, if its ``collate_fn`` sets one."""
        return budget_of(self.collate_fn)


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The driver's settings for a worker.

    Args:
        hub: the run's hub.
        split: the split of global batches with which the run starts.
        datasets: the settings of each data set.
        hang_s: the seconds without a sign of life after which a worker counts as hung.
        deterministic: whether the result must not depend on the number of workers.
        config: the Trainer's ``train_loop_config``.
        storage, name: the storage of checkpoints, and the name of the run's folder in it.
        program: the program's surroundings, in which the function runs.
        marker: what shows whether this node sees the run's storage; None: nothing to check.
        source: the identity of the training data, if the number of its samples does not tell it.
        drop_last: whether training passes leave out batches that are not full, unless the loop says otherwise.
        other_options_at: the step of the checkpoint from which the run starts, if a run with other options wrote it: optimizers then keep
            those that the user's function gives them.
    """

    hub: HubClient
    split: BatchSplit
    batch_size: BatchSize
    adaptation: Adaptation
    datasets: Mapping[str, DatasetSetup]
    checkpoints: Checkpoints
    precision: Precision
    seed: int
    hang_s: float
    deterministic: bool
    storage: Storage
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    program: Program | None = None
    marker: Marker | None = None
    source: str | None = None
    drop_last: bool = False
    other_options_at: int | None = None

    @property
    def train(self) -> DatasetSetup:
        """The settings of the training data."""
        return self.datasets[TRAIN]

    def joined(self, functions: UserFunctions) -> WorkerSetup:
        """The settings with the user's part, which arrives beside them."""
        datasets = {
            name: replace(dataset, on_device=functions.on_device[name], collate_fn=functions.collate_fn.get(name))
            for name, dataset in self.datasets.items()
        }
        return replace(self, datasets=datasets, config=functions.config)


def first_pass(split: BatchSplit, *, deterministic: bool) -> PassRequest:
    """The first pass of every new run. The driver starts it while the workers start."""
    first_rows = split.local_batch_size * split.workers
    batch = split.global_batch_size if deterministic else None
    return PassRequest(world_size=split.workers, first_rows=first_rows, epoch=0, batch=batch)
