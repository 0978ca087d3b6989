"""The contract between the feed and what makes the blocks of its passes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Protocol

from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.pace import Pace
from offload.pipeline.feed.passes import Pass, PassKey, Slice

# Shares of the cluster's object store: the limit of a Ray Data execution, and the limit of the blocks that no worker has taken yet,
# over all passes. The blocks that workers hold (a few each) come on top.
DATA_SHARE = 0.3
HELD_SHARE = 0.3

# The share that a pass which workers take from may hold even where other passes, such as the next epoch's, hold all of HELD_SHARE.
OWN_SHARE = 0.1


class EngineFeed(Protocol):
    """The feed as its engines know it: what they may read, and whom they report to."""

    lock: threading.RLock
    """Guards passes and their tasks."""
    handle: Any
    """The hub's handle, for processes that report to it."""
    streams: dict[str, FeedDataset]
    meters: dict[str, Meter]
    cores: Cores
    pace: Pace

    def homes(self) -> frozenset[str]:
        """The nodes of the workers, or those on which they are starting; empty if unknown."""

    def held(self) -> Counter[str]:
        """The bytes of blocks that no worker has taken yet, by node."""

    def travelling(self) -> Counter[str]:
        """The bytes that workers have taken and that have not arrived, by node."""

    def issued(self, current: Pass) -> None:
        """Report that all blocks of a pass are made or under way."""

    def lost(self, node: str, error: BaseException) -> None:
        """Report that a core's process died."""

    def works(self, node: str) -> None:
        """Report that a node has made its first block."""

    def failed(self, error: BaseException) -> None:
        """Report that the engine cannot go on."""


class Engine(Protocol):
    """Makes the blocks of passes, in order, and no more of them than the workers can use soon."""

    def start(self, current: Pass) -> None:
        """Begin to make the blocks of a pass: put each into it, with its number, and end or fail it. ``current.closed`` ends the work."""

    def exhausted(self, key: PassKey) -> bool:
        """Return whether all blocks of a pass are made or under way."""

    def again(self, current: Pass, rank: int, piece: Slice) -> None:
        """Make a slice again whose block is lost, and repay it to the rank; fail the pass if that is impossible."""

    def drop(self, key: PassKey) -> None:
        """Forget a pass, which is closed."""

    def look(self) -> None:
        """Look for work: workers have taken blocks, or passes have begun."""

    def reshape(self) -> threading.Event:
        """Use the feed's present cores. Return an event that is set once surplus ones are free."""

    def starting(self) -> int:
        """The number of cores whose processes are still starting."""
