"""What a worker fetches: slow links hold up nothing but their own blocks, and every slice comes once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from offload.errors import RunError
from offload.pipeline.blocks.fetching import AT_ONCE, BlockLostError
from offload.pipeline.blocks.wire import Columns
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.train.worker.data.slice_fetcher import Fetcher, allowed

KEY = PassKey(attempt=1, name="train", number=0)
WAIT_S = 800.0


class Links:
    """A feed of slices in an order, some of them far: these come only once the test opens the link."""

    def __init__(self, order: str) -> None:
        self.lines: dict[Reach, list[Slice]] = {"near": [], "far": [], "any": []}
        for number, letter in enumerate(order):  # n: near, f: far
            piece = Slice(None, 0, 1, number)  # type: ignore[arg-type]
            self.lines["far" if letter == "f" else "near"].append(piece)
            self.lines["any"].append(piece)
        self.far = {number for number, letter in enumerate(order) if letter == "f"}
        self.open, self.changed = threading.Event(), threading.Condition()
        self.started: list[int] = []
        self.told: list[tuple[str, int]] = []
        self.lost: set[int] = set()
        self.error: Exception | None = None

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        with self.changed:
            line = self.lines[reach]
            taken = [line.pop(0) for _ in range(min(want, len(line)))]
            if not taken and self.error is not None:
                raise self.error
            return taken, not line

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None:
        self.told.append((reach, arrived))

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        with self.changed:
            self.started += [piece.first] if piece.first in self.far else []
            self.changed.notify_all()
        return lambda: self._columns(piece)

    def _columns(self, piece: Slice) -> Columns:
        if piece.first in self.far:
            assert self.open.wait(WAIT_S)
        if piece.first in self.lost:
            raise BlockLostError
        return {"x": np.array([piece.first])}

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        with self.changed:
            self.lost.remove(piece.first)
            self.lines["near"].append(piece)
            self.lines["any"].append(piece)

    def leave(self, key: PassKey, rank: int) -> None: ...


def numbers(fetcher: Fetcher, count: int | None = None) -> list[int]:
    """The next slices, all of them if ``count`` is None."""
    found: list[int] = []
    while count is None or len(found) < count:
        piece = fetcher.get(WAIT_S)
        if piece is None:
            break
        found.append(int(piece[0]["x"][0]))
    return found


def made(feed: Any, *, ordered: bool = False) -> Fetcher:
    return Fetcher(feed, KEY, 0, ordered=ordered)


def test_near_slices_overtake_far_ones() -> None:
    feed = Links("ffnfnffnnn")
    fetcher = made(feed)
    assert numbers(fetcher, 5) == [2, 4, 7, 8, 9]
    with feed.changed:
        assert feed.changed.wait_for(lambda: feed.started == [0], WAIT_S), (
            "one alone, until the link has shown its speed"
        )
    with pytest.raises(queue.Empty):
        fetcher.get(0.0)
    feed.open.set()
    assert numbers(fetcher) == [0, 1, 3, 5, 6]


def test_the_hub_hears_of_each_far_slice_that_comes() -> None:
    """Its next request may already wait there, and tasks of that node wait for the pace of its link."""
    feed = Links("nfnf")
    feed.open.set()
    assert sorted(numbers(made(feed))) == [0, 1, 2, 3]
    assert feed.told == [("far", 1), ("far", 2)]


def test_an_ordered_pass_waits_for_the_link_and_keeps_it_busy() -> None:
    feed = Links("nnnnfnnff")
    fetcher = made(feed, ordered=True)
    assert numbers(fetcher, 4) == [0, 1, 2, 3]
    with feed.changed:
        assert feed.changed.wait_for(lambda: feed.started == [4, 7], WAIT_S), "fetched ahead, past the near ones"
    feed.open.set()
    assert numbers(fetcher) == [4, 5, 6, 7, 8]


def test_a_slow_link_carries_one_slice_at_a_time_and_a_fast_one_several() -> None:
    """Ray sends anew what has not come after ten seconds: several at a time on a slow link would travel twice."""
    slow = fast = AT_ONCE
    for _ in range(5):
        slow, fast = allowed(slow, AT_ONCE, 8.0), allowed(fast, AT_ONCE, 0.2)
        assert allowed(slow, AT_ONCE, 2.0) == slow
    assert (slow, fast) == (1, AT_ONCE)
    assert allowed(1, AT_ONCE, 0.2) == 2


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1, 2, 3, 4, 5}, {5}])
def test_a_lost_slice_comes_again_and_each_comes_once(lost: set[int], ordered: bool) -> None:
    feed = Links("nfnffn")
    feed.lost = set(lost)
    feed.open.set()
    found = numbers(made(feed, ordered=ordered))
    assert sorted(found) == list(range(6))
    assert not ordered or found == list(range(6))


def test_what_came_before_an_error_is_used() -> None:
    feed = Links("nn")
    feed.error = RunError("broken")
    fetcher = made(feed)
    assert numbers(fetcher, 2) == [0, 1]
    with pytest.raises(RunError, match="broken"):
        fetcher.get(WAIT_S)


def test_closing_ends_the_threads_though_pieces_wait() -> None:
    feed = Links("n" * 20 + "f" * 20)
    feed.open.set()
    fetcher = made(feed)
    assert fetcher.get(WAIT_S) is not None
    fetcher.close()
    for thread in fetcher.threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
