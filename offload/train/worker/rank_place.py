"""A worker's place in its group, and its connections to the outside. Real runs, rehearsals and tests each make their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from offload.train.worker.data.feed_client import FeedMaker, HubFeed
from offload.train.worker.links.peers import Peers, Talk
from offload.train.worker.saving.checkpointer import Checkpointer
from offload.train.worker.steps.joining import Join


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A worker's place in its group, and its connections to the outside.

    Args:
        attempt: the number of the group within the run, from 1.
        rank, world_size: the rank of this worker, and the number of workers.
        device: the device of the model and the batches.
        node: the id of this worker's node.
        talk: connects the training threads of all ranks.
        peers: connect the ranks' threads that cut batches, by data set.
        checkpoints: keeps the run's checkpoints.
        join: joins models with those of the other workers.
        share: copies rank 0's values of tensors to all ranks.
        feed: makes a client that reads the blocks of a feed.
        homes: the id of each rank's node, on rank 0.
        sleep: waits for a number of seconds. A rehearsal ends a worker there.
        report_every_s: the seconds between two reports to the hub.
    """

    rank: int
    world_size: int
    attempt: int = 1
    device: torch.device
    node: str
    homes: tuple[str, ...] = ()
    talk: Talk
    peers: Mapping[str, Peers]
    checkpoints: Checkpointer
    join: Join
    share: Callable[[Iterable[torch.Tensor]], None]
    feed: FeedMaker = HubFeed
    sleep: Callable[[float], None] = time.sleep
    report_every_s: float = 2.0
