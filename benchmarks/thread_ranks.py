"""The project's training loop with ranks that are threads of this process, for statistics that real clusters would take hours for.

Real: the split of global batches, the feed with its passes, the ranks' agreement, weights of uneven parts, learning rates, checkpoints,
and the way from one worker group to the next. Stand-ins (:mod:`tests.emulation.in_threads`): processes, Ray, preprocessing, and
torch.distributed, whose sum of gradients is here added up in the order of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.train.checkpoints.storage import Storage
from offload.train.config import Adaptation, BatchSize, Checkpoints
from offload.train.messages import TRAIN
from offload.train.worker.assembly import training_loop
from offload.train.worker.context import Context
from offload.train.worker.ends import StopRun
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.checkpointer import FolderCheckpointer
from offload.train.worker.setup import DatasetSetup, WorkerSetup
from tests.emulation.in_threads import LocalClient, LocalFeed, LocalHub, Peer, Ranks, Unjoined, run_ranks, share

DEADLINE_S = 3600.0


class _Mean(Unjoined):
    """Joins models by exchanges before their steps (``ctx.prepare(ddp=False)``)."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        first, *others = self._ranks.gather(self._rank, flat)
        mean = first.clone()
        for other in others:
            mean += other
        mean /= 1 + len(others)
        parts = torch.split(mean, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


class ThreadRanks:
    """A run whose worker groups are threads. Its checkpoints lie in a folder.

    Args:
        folder: the folder.
        samples: the number of training samples.
        sizes: the batch sizes.
        seed: of the order of passes.
        deterministic: whether a global batch holds the same samples for any number of workers.
    """

    def __init__(self, folder: Path, *, samples: int, sizes: BatchSize, seed: int, deterministic: bool = False) -> None:
        self._storage = Storage(path=str(folder))
        self._samples, self._sizes = samples, sizes
        self._seed, self._deterministic = seed, deterministic

    def train(self, function: Callable[[Context], None], workers: int) -> bool:
        """Run the function on each rank of a group, which begins with the newest checkpoint. Return whether the function ended; if not,
        :func:`make_way` ended the group. Raises the first error of a rank."""
        rows = list_torch_dataset(range(self._samples)).rows
        recipe: Any = None
        streams = {TRAIN: FeedDataset(recipe=recipe, rows=rows, shuffle=True, seed=self._seed)}
        hub = LocalHub(streams, Cores(nodes=("node",), task_cpus=1, stores={"node": 1e6}))
        setup = self._setup(hub, workers)
        ranks = {name: Ranks(workers) for name in ("talk", "checkpoints", "gradients", TRAIN)}
        finished: list[int] = []

        def work(rank: int) -> None:
            loop = training_loop(setup, _place(setup, ranks, rank, workers))
            try:
                function(Context(loop))
                loop.commit_rest()
                finished.append(rank)
            except StopRun:
                pass
            loop.finish()

        torch.manual_seed(self._seed)  # once: all threads draw from one generator
        error = run_ranks(work, workers, tuple(ranks.values()), DEADLINE_S)
        hub.nodes.close()
        if error is not None:
            raise error
        return len(finished) == workers

    def _setup(self, hub: LocalHub, workers: int) -> WorkerSetup:
        return WorkerSetup(
            hub=LocalClient(hub),
            split=self._sizes.split(workers),
            batch_size=self._sizes,
            adaptation=Adaptation(),
            datasets={TRAIN: DatasetSetup(samples=self._samples, resumable=True, ordered=False, varied=True)},
            checkpoints=Checkpoints(every_s=None, every_epochs=10**6),
            storage=self._storage,
            name="run",
            precision="fp32",
            seed=self._seed,
            hang_s=math.inf,
            deterministic=self._deterministic,
        )


def make_way(ctx: Context) -> None:
    """Commit, and end this worker group, as if the driver had ordered another one. All ranks must call it after the same step."""
    ctx._loop.ends.obey("resize")


def _place(setup: WorkerSetup, ranks: dict[str, Ranks], rank: int, workers: int) -> RankPlace:
    several = workers > 1
    talk = Peer(ranks["talk"], rank) if several else NoPeers()
    return RankPlace(
        rank=rank,
        world_size=workers,
        device=torch.device("cpu"),
        node="node",
        talk=talk,
        peers={TRAIN: Peer(ranks[TRAIN], rank) if several else NoPeers()},
        checkpoints=FolderCheckpointer(setup.storage, setup.name, setup.checkpoints, Peer(ranks["checkpoints"], rank)),
        join=_Mean(ranks["gradients"], rank),
        share=lambda tensors: share(talk, tensors),
        feed=LocalFeed,
    )
