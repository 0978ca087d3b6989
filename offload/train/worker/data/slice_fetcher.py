"""Fetches the slices of a pass to this host, ahead of the thread that cuts them into batches.

Blocks of this rank's own node are there at once. Those of other nodes come over a link: several are under way at a time, so that the link
is never idle, and near ones overtake them. Only where the order of the pass counts, all come in one line.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from offload.pipeline.blocks.fetching import AT_ONCE, BlockLostError
from offload.pipeline.blocks.wire import Columns
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.train.worker.data.feed_client import FeedClient

PREFETCH_BLOCKS = 2
"""The fetched slices that wait in a line for the cutting thread."""

SOON_S, LONG_S = 1.0, 3.0
"""The seconds of waiting for a slice that allow one more at a time, and those that halve their number. There is one at first: a block that
Ray carries is sent anew if it has not come after ten seconds, and a slow link then carries it twice."""

Piece = tuple[Columns, int]
"""The content of a slice, and its rows."""

SliceKey = tuple[int, int, int]


class Fetcher:
    """The pieces of one pass on one rank. ``ordered``: they come in the order of the pass, and those behind a lost one wait for it."""

    def __init__(self, feed: FeedClient, key: PassKey, rank: int, *, ordered: bool) -> None:
        self._feed, self._key, self._rank = feed, key, rank
        self._closed = threading.Event()
        self._arrivals = _Arrivals(ordered)
        # One thread each, so that a block that lies on this node never waits behind one on a slow link. A near block
        # needs no transfer, so one at a time is enough.
        lines: list[tuple[Reach, int]] = [("any", AT_ONCE)] if ordered else [("near", 1), ("far", AT_ONCE)]
        self._open = len(lines)
        self._changed = threading.Condition()
        # Near ones first, since a dict keeps its order.
        self._ready: dict[Reach, deque[Piece]] = {reach: deque() for reach, _ in lines}
        self._error: BaseException | None = None
        self.threads = [
            threading.Thread(target=self._run, args=line, name=f"fetch-{key.name}", daemon=True) for line in lines
        ]
        for thread in self.threads:
            thread.start()

    def get(self, timeout_s: float) -> Piece | None:
        """The next piece, a near one if there is one; None at the end of the pass.

        Raises queue.Empty if none comes in time, and the error of preprocessing.
        """
        with self._changed:
            self._changed.wait_for(lambda: any(self._ready.values()) or self._error or not self._open, timeout_s)
            for line in self._ready.values():
                if line:
                    self._changed.notify_all()
                    return line.popleft()
            if self._error is not None:
                raise self._error
            if self._open:
                raise queue.Empty
            return None

    def close(self) -> None:
        """End the threads, as soon as their present calls return."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def _run(self, reach: Reach, at_once: int) -> None:
        try:
            self._fetch(reach, at_once)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _fetch(self, reach: Reach, at_once: int) -> None:
        # Each slice under way, what waits for its content, and the seconds waited before it was asked for.
        coming: deque[tuple[Slice, Callable[[], Columns], float]] = deque()
        # One at first: the link may be slow, and transfers cannot be cancelled.
        waited_s, most, came = 0.0, 1, 0
        over = False
        while not self._closed.is_set():
            if len(coming) < most and not (over and not self._arrivals.lost):
                want = most - len(coming)
                slices, over = self._feed.next_slices(self._key, self._rank, want, reach, arrived=came, wait=not coming)
                coming.extend((piece, self._feed.fetch(piece), waited_s) for piece in slices)
            if coming:
                piece, columns, before_s = coming.popleft()
                began = time.monotonic()
                arrived = self._fetched(piece, columns)
                del columns  # it keeps the block in memory
                came += 1
                if reach != "near":  # the hub paces only blocks that come over a link
                    self._feed.arrived(self._key, self._rank, reach, came)
                waited_s += time.monotonic() - began
                most = allowed(most, at_once, waited_s - before_s)
                for fetched in arrived:
                    if not self._put(reach, fetched):
                        return
            elif over and not self._arrivals.lost:
                return

    def _fetched(self, piece: Slice, columns: Callable[[], Columns]) -> list[Piece]:
        """The pieces that may go on now that this one has come, or is lost."""
        place = piece.first, piece.start, piece.stop
        try:
            content = columns()
        except BlockLostError:
            self._feed.again(self._key, self._rank, piece)
            self._arrivals.lose(place)
            return []
        return self._arrivals.came(place, (content, piece.stop - piece.start))

    def _put(self, reach: Reach, piece: Piece) -> bool:
        line = self._ready[reach]
        with self._changed:
            self._changed.wait_for(lambda: len(line) < PREFETCH_BLOCKS or self._closed.is_set())
            if self._closed.is_set():
                return False
            line.append(piece)
            self._changed.notify_all()
            return True


def allowed(now: int, most: int, waited_s: float) -> int:
    """The slices that may be under way after one for which the thread has waited so long, all in all, since it was asked for."""
    if waited_s > LONG_S:
        return max(now // 2, 1)
    return min(now + 1, most) if waited_s < SOON_S else now


class _Arrivals:
    """The pieces on their way into batches. A lost piece comes again later; in an ordered pass, the others wait for it."""

    def __init__(self, ordered: bool) -> None:
        self.lost: set[SliceKey] = set()
        self._ordered = ordered
        self._waiting: dict[SliceKey, Piece | None] = {}

    def lose(self, place: SliceKey) -> None:
        """Note that the piece at this place is lost, perhaps again."""
        self.lost.add(place)
        self._waiting.setdefault(place, None)

    def came(self, place: SliceKey, piece: Piece) -> list[Piece]:
        """Add a piece that arrived; return the pieces that may now go on."""
        self.lost.discard(place)
        if not self._ordered:
            return [piece]
        self._waiting[place] = piece
        free: list[Piece] = []
        # In the order in which slices were asked for, which is that of the pass. A lost one holds up those behind it.
        for first, waiting in list(self._waiting.items()):
            if waiting is None:
                break
            free.append(waiting)
            del self._waiting[first]
        return free
