"""Fetch blocks into this process: straight from their node where that works, or else through Ray.

The workers of a run and the processes with a DataLoader fetch alike. Where it stops: they decide how many blocks are on their way, and what
to do about a lost one.
"""

from __future__ import annotations

import concurrent.futures
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from offload.actors.values import Answer
from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.blocks.sender import Rows

AT_ONCE = 4
"""The blocks of other nodes that are on their way to a process at a time, at most. Several keep the link busy. A block that Ray carries is
sent anew if it has not come after ten seconds: with more, a slow link would carry blocks twice."""

LOOK_S = 5.0  # time between two checks that Ray is still there


class BlockLostError(Exception):
    """A block is gone with the node that held it."""


class ArrivedBlock(NamedTuple):
    """A block that has come, or the part of it that was asked for. ``first_row``: the number of its first row in the whole block."""

    content: Any
    first_row: int = 0


def fetch_block(ref: Any, node: str, rows: Rows = None, *, direct: DirectBlocks | None) -> Callable[[], ArrivedBlock]:
    """Start the transfer of a block of this node. Return a function that waits for it, and raises BlockLostError.

    Args:
        ref: the block. One of this machine, without a cluster, is there at once.
        node: the node that holds it; empty if unknown.
        rows: the rows that are needed. Only a direct transfer leaves the others out.
        direct: brings blocks without Ray; None: Ray brings all.
    """
    if isinstance(ref, Answer):
        return lambda: ArrivedBlock(ref.result())
    straight = None if direct is None else direct.fetch(ref, node, rows)
    if straight is None:
        return _through_ray(ref)

    def arrived() -> ArrivedBlock:
        content = straight()
        if content is None:  # the connection failed
            return _through_ray(ref)()
        return ArrivedBlock(content, 0 if rows is None else rows[0])

    return arrived


def _through_ray(ref: Any) -> Callable[[], ArrivedBlock]:
    import ray

    # Not ray.get: it holds a lock of the process for a second at a time, so that a thread whose block is here would wait for the block
    # of another thread that still comes over a link.
    coming: concurrent.futures.Future[Any] = ref.future()

    def arrived() -> ArrivedBlock:
        # The future of a program that has left Ray never ends.
        while not (coming.done() or concurrent.futures.wait([coming], LOOK_S).done):
            if not ray.is_initialized():
                raise BlockLostError("the connection to Ray has ended")
        try:
            return ArrivedBlock(coming.result())
        except ray.exceptions.ObjectLostError as error:
            raise BlockLostError(str(error)) from None

    return arrived


class BlocksAhead:
    """Brings blocks here in a known order, a few ahead of the one that is wanted: all of them may be more than this host's memory.

    ``wanted``: a block and its node for each time that it will be asked for. It stays here until the last time.
    """

    def __init__(self, direct: DirectBlocks, wanted: Sequence[tuple[Any, str]]) -> None:
        self._direct = direct
        # Each block once, in the order of its first use.
        self._further = deque(dict(wanted).items())
        self._under_way: dict[Any, Callable[[], ArrivedBlock]] = {}
        self._here: dict[Any, Any] = {}
        self._times_left = Counter(ref for ref, _ in wanted)

    def block(self, ref: Any) -> Any:
        """Wait for a block. Raises BlockLostError if it is gone."""
        while self._further and len(self._under_way) < AT_ONCE:
            further, node = self._further.popleft()
            self._under_way[further] = fetch_block(further, node, direct=self._direct)
        if ref not in self._here:
            self._here[ref] = self._under_way.pop(ref)().content
        block = self._here[ref]
        self._times_left[ref] -= 1
        if not self._times_left[ref]:
            del self._here[ref]
        return block
