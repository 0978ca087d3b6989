"""Blocks on their way to an iteration: each is asked for once, in order, and only a few at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offload.loader import iterator
from offload.loader.iterator import _Coming
from offload.loader.line import BatchPlace
from offload.loader.recipe import FinishedBatches

IN_ORDER = [BatchPlace(ref, item, "node") for ref in range(10) for item in range(3)]
IN_TURNS = [BatchPlace((worker, block), item, "node") for block in range(3) for item in range(2) for worker in range(6)]


class Direct:
    """Notes what is asked for, and what is under way."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.under_way: set[object] = set()
        self.most = 0

    def fetch(self, ref: object, node: str) -> Callable[[], FinishedBatches]:
        self.asked.append(ref)
        self.under_way.add(ref)
        self.most = max(self.most, len(self.under_way))

        def block() -> FinishedBatches:
            self.under_way.remove(ref)
            return FinishedBatches((), self.asked.index(ref))

        return block


@pytest.mark.parametrize("places", [IN_ORDER, IN_TURNS, IN_ORDER[:1], []], ids=["in order", "in turns", "one", "none"])
def test_a_few_blocks_are_on_their_way_and_each_comes_once(places: list[BatchPlace]) -> None:
    direct = Direct()
    coming = _Coming(direct, places)  # type: ignore[arg-type]
    expected = list(dict.fromkeys(place.ref for place in places))
    found = [expected[coming.block(place.ref).num_rows] for place in places]
    assert found == [place.ref for place in places]
    assert direct.asked == expected
    assert direct.most <= iterator.AT_ONCE
    assert not direct.under_way
    assert not coming._here, "a block whose batches are out is let go"
