"""What a worker asks of the feed, and how it asks the run's actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import ray

from offload.pipeline import wire
from offload.pipeline.passes import PassKey, PassRequest, Slice
from offload.pipeline.wire import POSITION, SAMPLE_ID, Columns


class BlockLostError(Exception):
    """A block is gone with the node that held it."""


class FeedClient(Protocol):
    """The feed, for one pass of one rank."""

    def take(self, key: PassKey, rank: int, want: int) -> tuple[list[Slice], bool]:
        """See :meth:`offload.pipeline.feed.Feed.take`."""

    def start_fetching(self, slices: Sequence[Slice]) -> None:
        """Let the blocks of these slices travel to this host, all at the same time."""

    def columns(self, piece: Slice) -> Columns:
        """The content of a slice, with its samples' positions and ids. Raises BlockLostError."""

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        """See :meth:`offload.pipeline.feed.Feed.again`."""

    def leave(self, key: PassKey, rank: int) -> None:
        """See :meth:`offload.pipeline.feed.Feed.leave`."""


def open_pass(feed: Any, key: PassKey, request: PassRequest, rank: int) -> int | None:
    """Open a pass at the feed actor."""
    rows: int | None = ray.get(feed.open.remote(key, request, rank))
    return rows


class ActorFeed:
    """The feed actor as a :class:`FeedClient`. Asks for the next slices while the last ones are being fetched."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None

    def take(self, key: PassKey, rank: int, want: int) -> tuple[list[Slice], bool]:
        asked = self._asked if self._asked is not None else self._actor.take.remote(key, rank, want)
        try:
            slices, over = ray.get(asked)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, BaseException) else error from None
        self._asked = None if over else self._actor.take.remote(key, rank, want)
        return slices, over

    def start_fetching(self, slices: Sequence[Slice]) -> None:
        refs = list({piece.ref: None for piece in slices})
        if len(refs) > 1:  # start all transfers before waiting for the first
            ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)

    def columns(self, piece: Slice) -> Columns:
        try:
            table = ray.get(piece.ref)
        except ray.exceptions.ObjectLostError as error:
            raise BlockLostError(str(error)) from None
        columns = {name: column[piece.start : piece.stop] for name, column in wire.decode(table).items()}
        if POSITION not in columns:
            columns[POSITION] = np.arange(piece.first + piece.start, piece.first + piece.stop, dtype=np.int64)
        columns.setdefault(SAMPLE_ID, columns[POSITION])
        return columns

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        ray.get(self._actor.again.remote(key, rank, piece))

    def leave(self, key: PassKey, rank: int) -> None:
        self._actor.leave.remote(key, rank)
