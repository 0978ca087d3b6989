"""A worker's access to the feed, through the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from offload.pipeline.blocks import wire
from offload.pipeline.blocks.fetching import ArrivedBlock, fetch_block
from offload.pipeline.blocks.receiver import DirectBlocks, Pending
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID, Columns
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.train.hub.calls import Opened, OtherFeed, RankCalls
from offload.train.hub.client import HubClient


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
    """A reader of blocks in the object store. ``direct`` brings blocks of other nodes; without it, or where it cannot, Ray brings them."""

    def __init__(self, direct: DirectBlocks | None = None) -> None:
        self._direct = direct

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        arrived = fetch_block(piece.ref, piece.node, (piece.start, piece.stop), direct=self._direct)
        return lambda: _columns(arrived(), piece)


def _columns(arrived: ArrivedBlock, piece: Slice) -> Columns:
    """The content of a slice, with its samples' positions and ids."""
    start, stop = piece.start - arrived.first_row, piece.stop - arrived.first_row
    columns = {name: column[start:stop] for name, column in wire.decode(arrived.content).items()}
    if POSITION not in columns:
        columns[POSITION] = np.arange(piece.first + piece.start, piece.first + piece.stop, dtype=np.int64)
    columns.setdefault(SAMPLE_ID, columns[POSITION])
    return columns


class HubFeed(BlockReader):
    """The hub, or a feed beside it, as a :class:`FeedClient`. It asks for the next slices while it fetches the last ones.

    ``first``: the first rank that the feed serves.
    """

    def __init__(self, hub: RankCalls, direct: DirectBlocks, first: int = 0) -> None:
        super().__init__(direct)
        self._hub, self._first = hub, first
        self._asked: dict[Reach, Pending[tuple[list[Slice], bool]]] = {}

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        answer = self._asked.pop(reach, None) or self._hub.next_slices(key, rank - self._first, want, reach, arrived)
        if not wait and not answer.done():
            self._asked[reach] = answer
            return [], False
        slices, over = answer.result()
        if not over:
            self._asked[reach] = self._hub.next_slices(key, rank - self._first, want, reach, arrived)
        return slices, over

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None:
        asked = self._asked.get(reach)
        if asked is not None and not asked.done():  # the next request says it otherwise
            self._hub.arrived(key, rank - self._first, reach, arrived)

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        self._hub.again(key, rank - self._first, piece)

    def leave(self, key: PassKey, rank: int) -> None:
        self._hub.leave(key, rank - self._first)


FeedMaker = Callable[[RankCalls, DirectBlocks, int], FeedClient]
"""Makes a client of a feed, as :class:`HubFeed` is made."""

_Client = TypeVar("_Client")


def feed_of(
    opened: Opened, hub: HubClient, direct: DirectBlocks, make: Callable[[RankCalls, DirectBlocks, int], _Client]
) -> _Client:
    """The client of the feed that serves this rank in a pass that it has joined. ``make``: a :data:`FeedMaker`."""
    return make(hub if opened.feed is None else OtherFeed(opened.feed), direct, opened.first)
