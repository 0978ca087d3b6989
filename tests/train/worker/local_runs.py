"""Runs of a training function on the real training loop, whose workers are threads of the test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.model.feeds import ONE_FEED, FeedRule
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.train.checkpoints.storage import Storage
from offload.train.config import Adaptation, BatchSize, Checkpoints
from offload.train.messages import TRAIN
from offload.train.worker.assembly import training_loop
from offload.train.worker.context import Context
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.loop import TrainingLoop
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.checkpointer import CheckpointContent, FolderCheckpointer
from offload.train.worker.setup import DatasetSetup, WorkerSetup
from offload.train.worker.steps.joining import Join
from tests.emulation.in_threads import (
    Died,
    LocalClient,
    LocalFeed,
    LocalHub,
    Peer,
    Ranks,
    Unjoined,
    run_ranks,
    share,
)

VAL = "val"
UNLABELED = "unlabeled"  # shuffled in each pass
SETS = (TRAIN, VAL, UNLABELED)
DEADLINE_S = 800.0


class LocalRun:
    """A run whose checkpoints lie in a folder. Another call of :meth:`train` resumes it.

    Args:
        folder: the folder of the checkpoints.
        samples: the number of samples of each data set.
        sizes: the batch sizes.
        join: makes what joins a worker's models with those of the others.
        kept: gets the metrics of each checkpoint.
        resumable: whether training samples have ids, so that a pass can go on where it stopped.
        rule: the number of feeds.
        nodes: the nodes, each with a core, on which ranks are in turn.
        hub: the hub of the newest training.
    """

    def __init__(
        self,
        folder: Path,
        *,
        samples: int = 64,
        sizes: BatchSize | None = None,
        checkpoints: Checkpoints | None = None,
        join: Callable[[], Join] = Unjoined,
        kept: Callable[[Mapping[str, Any]], None] = lambda metrics: None,
        resumable: bool = True,
        rule: FeedRule = ONE_FEED,
        nodes: tuple[str, ...] = ("node",),
    ) -> None:
        self.samples, self.sizes = samples, sizes or BatchSize(initial=8)
        self.checkpoints = checkpoints or Checkpoints(every_s=None)
        self.storage = Storage(path=str(folder))
        self._join, self._kept, self._resumable = join, kept, resumable
        self._rule, self._nodes = rule, nodes
        self.hub: LocalHub | None = None

    def train(self, function: Callable[[Context], None], *, workers: int = 1) -> list[TrainingLoop]:
        """Run the function on each worker, and return their loops. A function that raises Died ends as a killed process. Raises the
        first error of a worker."""
        rows = list_torch_dataset(range(self.samples)).rows
        recipe: Any = None
        streams = {name: FeedDataset(recipe=recipe, rows=rows, shuffle=name != VAL) for name in SETS}
        cores = Cores(nodes=self._nodes, task_cpus=1, stores=dict.fromkeys(self._nodes, 1e6))
        self.hub = hub = LocalHub(streams, cores, self._rule)
        ranks = {name: Ranks(workers) for name in ("talk", "checkpoints", *SETS)}
        loops: dict[int, TrainingLoop] = {}

        def work(rank: int) -> None:
            torch.manual_seed(0)
            loops[rank] = loop = training_loop(
                setup := self._setup(hub, streams, workers), self._place(setup, ranks, rank, workers)
            )
            function(Context(loop))
            loop.commit_rest()
            loop.finish()

        error = run_ranks(work, workers, tuple(ranks.values()), DEADLINE_S)
        hub.close()
        if error is not None and not isinstance(error, Died):
            raise error
        return [loops[rank] for rank in range(workers)]

    def _setup(self, hub: LocalHub, streams: Mapping[str, FeedDataset], workers: int) -> WorkerSetup:
        return WorkerSetup(
            hub=LocalClient(hub),
            split=self.sizes.split(workers),
            batch_size=self.sizes,
            adaptation=Adaptation(),
            datasets={
                name: DatasetSetup(
                    samples=self.samples, resumable=self._resumable, ordered=name == VAL, varied=name != VAL
                )
                for name in streams
            },
            checkpoints=self.checkpoints,
            storage=self.storage,
            name="run",
            precision="fp32",
            seed=0,
            hang_s=math.inf,  # threads of a failed worker outlive the test, and the watchdog would end this process
            deterministic=False,
        )

    def _place(self, setup: WorkerSetup, ranks: Mapping[str, Ranks], rank: int, workers: int) -> RankPlace:
        several = workers > 1
        checkpointer = _Checkpointer(setup.storage, setup.name, setup.checkpoints, Peer(ranks["checkpoints"], rank))
        checkpointer.kept = self._kept
        return RankPlace(
            rank=rank,
            world_size=workers,
            device=torch.device("cpu"),
            node=self._nodes[rank % len(self._nodes)],
            homes=tuple(self._nodes[each % len(self._nodes)] for each in range(workers)),
            talk=Peer(ranks["talk"], rank) if several else NoPeers(),
            peers={name: Peer(ranks[name], rank) if several else NoPeers() for name in SETS},
            checkpoints=checkpointer,
            join=self._join(),
            share=lambda tensors: share(Peer(ranks["talk"], rank), tensors),
            feed=LocalFeed,
        )


class _Checkpointer(FolderCheckpointer):
    """A checkpointer that tells the metrics of each checkpoint."""

    kept: Callable[[Mapping[str, Any]], None]

    def keep(self, metrics: Mapping[str, Any], content: CheckpointContent | None, *, wait: bool) -> None:
        super().keep(metrics, content, wait=wait)
        if content is not None:
            self.kept(metrics)


def prepared(ctx: Context, *, lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer, prepared."""
    model = torch.nn.Linear(1, 1)
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A loss on a batch."""
    return model(torch.ones(len(batch["sample_id"]), 1)).mean()  # type: ignore[no-any-return]


def commit(ctx: Context) -> None:
    """Commit a checkpoint between two steps, as the loop does at regular intervals."""
    ctx._loop.committer.commit("interval")
