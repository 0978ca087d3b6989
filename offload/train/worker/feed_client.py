"""A worker's access to the feed, through the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pyarrow as pa
import ray

from offload.pipeline.blocks import wire
from offload.pipeline.blocks.receiver import DirectBlocks, Pending
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID, Columns
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.train.hub.client import HubClient


class BlockLostError(Exception):
    """A block is gone with the node that held it."""


class FeedClient(Protocol):
    """The feed, for one pass of one rank."""

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        """See :meth:`offload.pipeline.feed.feed.Feed.next_slices`. Without ``wait``, the answer is empty if none is there yet."""

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None:
        """See :meth:`offload.pipeline.feed.feed.Feed.arrived`."""

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        """Start the transfer of a slice's block to this host. The result waits for it, and returns the slice's content, with its samples'
        positions and ids. It raises BlockLostError."""

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        """See :meth:`offload.pipeline.feed.feed.Feed.again`."""

    def leave(self, key: PassKey, rank: int) -> None:
        """See :meth:`offload.pipeline.feed.feed.Feed.leave`."""


class BlockReader:
    """A reader of blocks in the object store.

    It never waits in ``ray.get``. That holds a lock of the process for a second at a time, and a thread that wants a block which is here
    would wait for another thread's that still comes over a link.
    """

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        coming = piece.ref.future()

        def columns() -> Columns:
            try:
                return _columns(coming.result(), piece)
            except ray.exceptions.ObjectLostError as error:
                raise BlockLostError(str(error)) from None

        return columns


def _columns(block: pa.Table, piece: Slice) -> Columns:
    columns = {name: column[piece.start : piece.stop] for name, column in wire.decode(block).items()}
    if POSITION not in columns:
        columns[POSITION] = np.arange(piece.first + piece.start, piece.first + piece.stop, dtype=np.int64)
    columns.setdefault(SAMPLE_ID, columns[POSITION])
    return columns


class HubFeed(BlockReader):
    """The hub as a :class:`FeedClient`. It asks for the next slices while it fetches the last ones. ``direct`` brings blocks of other
    nodes; Ray brings those that it cannot."""

    def __init__(self, hub: HubClient, direct: DirectBlocks) -> None:
        self._hub, self._direct = hub, direct
        self._asked: dict[Reach, Pending[tuple[list[Slice], bool]]] = {}

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        answer = self._asked.pop(reach, None) or self._hub.next_slices(key, rank, want, reach, arrived)
        if not wait and not answer.done():
            self._asked[reach] = answer
            return [], False
        slices, over = answer.result()
        if not over:
            self._asked[reach] = self._hub.next_slices(key, rank, want, reach, arrived)
        return slices, over

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        block = self._direct.fetch(piece.ref, piece.node, (piece.start, piece.stop))
        if block is None:
            return super().fetch(piece)

        def columns() -> Columns:
            if (found := block()) is None:
                return BlockReader.fetch(self, piece)()
            rows = piece.stop - piece.start
            return _columns(found, piece._replace(start=0, stop=rows, first=piece.first + piece.start))

        return columns

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None:
        asked = self._asked.get(reach)
        if asked is not None and not asked.done():  # otherwise, the next request tells it
            self._hub.arrived(key, rank, reach, arrived)

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        self._hub.again(key, rank, piece)

    def leave(self, key: PassKey, rank: int) -> None:
        self._hub.leave(key, rank)
