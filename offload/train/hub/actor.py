"""The hub feeds the workers of a run and receives their reports. One object does both. On a Ray cluster it is an actor
(:mod:`offload.train.hub.ray_hub`), and without one it lives in the driver.

This module does not import torch: on a host with few cores, the hub starts beside the workers, which do.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed, FeedListener
from offload.pipeline.pool.pool import Pool, PoolMaker
from offload.pipeline.program.printed import Outlet, Printed
from offload.report.events import (
    BlocksThroughRay,
    CacheStopped,
    DataPrinted,
    NodePreprocesses,
    PreprocessingLost,
    PreprocessingSlow,
)
from offload.report.run_tail import Tails, tails_in
from offload.train.hub.board import Board
from offload.train.hub.division import FeedTerms
from offload.train.hub.feeds import Feeds
from offload.train.messages import GroupStart

SWITCH_S = 0.0005
"""The time for which a thread of the hub keeps Python's lock while others wait for it, a tenth of Python's default. A worker's call
takes the lock several times. On a large cluster, the pool's thread always has work, and calls that wait five milliseconds each time fall
behind it."""


GARBAGE = 50_000
"""New objects after which the hub's process looks for cyclic garbage; Python's default is 700. A pass keeps its tasks until its end, and
each look goes through all of them."""


def take_turns() -> None:
    """Let the threads of this process, a hub, switch often."""
    sys.setswitchinterval(SWITCH_S)


def collect_seldom() -> None:
    """Let this process, a hub, look for cyclic garbage seldom, and never among what it has imported."""
    gc.freeze()
    gc.set_threshold(GARBAGE, 10, 10)


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _by_feed(method: Callable[Concatenate[Feed, _P], _T]) -> Callable[Concatenate[Hub, _P], _T]:
    """A remote method of the hub that its feed answers. Ray calls it by the method's name, and reads its signature."""

    @functools.wraps(method)
    def answer(hub: Hub, /, *args: _P.args, **named: _P.kwargs) -> _T:
        return method(hub.feed, *args, **named)

    return answer


def _by_feeds(method: Callable[Concatenate[Feeds, _P], _T]) -> Callable[Concatenate[Hub, _P], _T]:
    """A remote method of the hub that all feeds of its run answer together."""

    @functools.wraps(method)
    def answer(hub: Hub, /, *args: _P.args, **named: _P.kwargs) -> _T:
        return method(hub.feeds, *args, **named)

    return answer


def _by_board(method: Callable[Concatenate[Board, _P], _T]) -> Callable[Concatenate[Hub, _P], _T]:
    """A remote method of the hub that its board answers."""

    @functools.wraps(method)
    def answer(hub: Hub, /, *args: _P.args, **named: _P.kwargs) -> _T:
        return method(hub.board, *args, **named)

    return answer


class Hub(FeedListener):
    """The actor from which workers get batches and to which they report; the driver reads it. Call it through
    :class:`offload.train.hub.client.HubClient`.

    It holds a feed, which hands out blocks, and a board, which passes reports and orders on. Neither knows the other. On a large cluster,
    other feeds have a part of the ranks (:mod:`offload.train.hub.feeds`).

    Args:
        streams: the data sets, by name.
        cores: the cores that preprocess at first.
        nodes: the number of nodes at the start.
        run_dir: the run directory.
        title: its name.
        handle: a handle of this object, to which preprocessing processes report.
        pool: makes the pool of preprocessing processes.
        terms: what is known of the run's feeds. More than one takes :meth:`_start_feed`.
    """

    feeds: Feeds
    board: Board

    # For the driver.
    publish = _by_board(Board.publish)
    read = _by_board(Board.read)
    note = _by_board(Board.note)
    await_calls = _by_board(Board.await_calls)
    reshape = _by_feeds(Feeds.reshape)
    start_ahead = _by_feeds(Feeds.start_ahead)
    costs = _by_feeds(Feeds.costs)
    core_counts = _by_feeds(Feeds.core_counts)

    # For the workers.
    push = _by_board(Board.push)
    out_of_memory = _by_board(Board.out_of_memory)
    call_driver = _by_board(Board.call_driver)
    open = _by_feeds(Feeds.open)
    next_slices = _by_feed(Feed.next_slices)
    arrived = _by_feed(Feed.arrived)
    again = _by_feed(Feed.again)
    sender = _by_feeds(Feeds.sender)
    leave = _by_feed(Feed.leave)

    # For the supervisor of the workers.
    worker_failed = _by_board(Board.worker_failed)

    def __init__(
        self,
        streams: dict[str, FeedDataset],
        cores: Cores,
        nodes: int,
        run_dir: Path,
        *,
        title: str = "hub",
        handle: Any = None,
        pool: PoolMaker = Pool,
        terms: FeedTerms | None = None,
    ) -> None:
        self._run_dir, self._tails = run_dir, tails_in(run_dir)
        # A node has a process per core, and each of them reports the same problem.
        self._without_cache: set[str] = set()
        self._through_ray: set[str] = set()
        # Calls come on many threads. Without this lock, the lines of one process could change their order.
        self._outlet, self._passing_on = Outlet(), threading.Lock()
        self._title = title
        # The board comes first: the threads of the feed's pool may report as soon as they start.
        self.board = Board(lambda: self.feeds.supply(), nodes=nodes)
        self.feeds = Feeds(
            cores,
            terms or FeedTerms(),
            own=lambda share: Feed(streams, share, pool, handle=handle, listener=self),
            start=self._start_feed,
            end=self._end_feed,
        )

    @property
    def feed(self) -> Feed:
        """The hub's own feed."""
        return self.feeds.own

    def __repr__(self) -> str:
        return self._title

    def run_dir(self) -> Path:
        """The run directory, on this host."""
        return self._run_dir

    def tails(self, offsets: Mapping[str, int]) -> Tails:
        """What the files of the run directory hold from these offsets on, for views on other hosts."""
        return self._tails(offsets)

    def begin_group(self, attempt: int, homes: Sequence[str] = ()) -> GroupStart:
        """Start the worker group of this attempt, whose ranks are on the nodes ``homes``; drop the passes of the previous group."""
        start = self.board.begin_group(attempt)
        self.feeds.begin(start.attempt, homes)
        return start

    def lost(self, node: str, error: BaseException) -> None:
        """Report that a preprocessing process died."""
        self.note(PreprocessingLost(node=node, reason=str(error).strip().splitlines()[0]))

    def slow(self, node: str, what: str, seconds: float) -> None:
        """Report that a preprocessing process has worked on one sample for a long time."""
        self.note(PreprocessingSlow(node=self.address(node), what=what, seconds=round(seconds)))

    def cache_stopped(self, node: str, reason: str) -> None:
        """Report that a preprocessing process stores nothing more in its node's cache. The first report of a node counts."""
        if node not in self._without_cache:
            self._without_cache.add(node)
            self.note(CacheStopped(node=self.address(node), reason=reason))

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """Report that the blocks of a node do not reach the workers directly. The first report of a node counts."""
        if node not in self._through_ray:
            self._through_ray.add(node)
            self.note(BlocksThroughRay(node=self.address(node), reason=reason))

    def printed(self, key: str, printed: Printed) -> None:
        """Report what a preprocessing process has printed."""
        with self._passing_on:
            self._outlet.put(printed)
            self._pass_on()

    def end_printing(self) -> None:
        """Report how many lines the limit has held back."""
        with self._passing_on:
            self._pass_on(last=True)

    def _pass_on(self, *, last: bool = False) -> None:
        for line in self._outlet.pop_lines(last=last):
            self.note(DataPrinted(stream=line.stream, text=line.text))

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """Report that a preprocessing process ends because nothing can interrupt its call."""
        self.feeds.given_up(self.address(node), what, seconds)

    def works(self, node: str) -> None:
        """Report that a node has begun to preprocess, once for all feeds."""
        if self.feeds.works(node):
            self.note(NodePreprocesses(node=node))

    def address(self, node: str) -> str:
        """The address by which users know a node."""
        return node

    def _start_feed(self, cores: Cores) -> Any:
        """Start another feed with these cores; return its handle."""
        raise NotImplementedError

    def _end_feed(self, feed: Any) -> None:
        """End another feed."""
        raise NotImplementedError
