"""Ranks that fetch the blocks of a pass as workers do, and count their rows. Where it stops: :mod:`benchmarks.stand_ins` has the cores."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from offload.measure.steps import Totals
from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.blocks.wire import POSITION
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.train.hub.client import HubClient
from offload.train.messages import GroupStatus, Push
from offload.train.worker.data.feed_client import HubFeed, feed_of
from offload.train.worker.data.slice_fetcher import Fetcher

RANKS_PER_NODE = 8
PUSH_S = 2.0  # by the cluster's clock


class Ranks:
    """A process that stands for the workers of one node: each fetches like a worker, and counts."""

    def __init__(self, ranks: Sequence[int], world_size: int, node: str, slower: int) -> None:
        self._node, self._slower = node, slower
        self._ranks, self._world_size = ranks, world_size
        self._rows: dict[int, int] = dict.fromkeys(ranks, 0)
        self._first: dict[int, float] = {}
        self._positions: list[Any] = []
        self._pieces = 0
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def begin(self, hub: HubClient, key: PassKey, request: PassRequest) -> None:
        """Take the rows of a pass from now on."""
        self._hub = hub
        self._rows, self._first, self._positions = dict.fromkeys(self._ranks, 0), {}, []
        self._pieces = 0
        self._ended.clear()
        self._threads = [
            threading.Thread(target=self._take, args=(key, request, rank), daemon=True) for rank in self._ranks
        ]
        self._threads += [threading.Thread(target=self._push, args=(rank,), daemon=True) for rank in self._ranks]
        for thread in self._threads:
            thread.start()

    def counts(self) -> tuple[dict[int, int], dict[int, float]]:
        """The rows of each rank so far, and when its first ones came. Raises the error of a rank."""
        if self._error is not None:
            raise self._error
        return dict(self._rows), dict(self._first)

    def join(self) -> Any:
        """Wait for the end of the pass. Return the positions of all rows."""
        for thread in self._threads[: len(self._ranks)]:
            thread.join()
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return np.concatenate(self._positions) if self._positions else np.zeros(0, np.int64)

    def leave(self) -> None:
        """Take no more of the pass."""
        self._ended.set()

    def _take(self, key: PassKey, request: PassRequest, rank: int) -> None:
        try:
            self._take_all(key, request, rank)
        except BaseException as error:  # nobody else would hear of it
            self._error = error

    def _take_all(self, key: PassKey, request: PassRequest, rank: int) -> None:
        opened = self._hub.open(key, request, rank, self._node)
        feed = feed_of(opened, self._hub, DirectBlocks(self._hub), HubFeed)
        fetcher = Fetcher(feed, key, rank, ordered=False)
        while not self._ended.is_set():
            with contextlib.suppress(queue.Empty):
                piece = fetcher.get(1.0)
                if piece is None:
                    break
                self._first.setdefault(rank, time.time())
                self._rows[rank] += piece[1]
                self._pieces += 1
                self._positions.append(piece[0][POSITION].copy())
        fetcher.close()
        feed.leave(key, rank)

    def _push(self, rank: int) -> None:
        group = GroupStatus(workers=self._world_size)
        while not self._ended.wait(PUSH_S * self._slower):
            rows = self._rows[rank]
            totals = Totals(steps=self._pieces, samples=rows)
            self._hub.push(Push(rank=rank, totals=totals, epoch=0, step=1, samples=rows, node=self._node, group=group))
