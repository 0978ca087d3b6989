"""Blocks on their way to a process: each is asked for once, in order, and only a few at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offload.pipeline.blocks.fetching import AT_ONCE, BlocksAhead

Wanted = list[tuple[object, str]]

IN_ORDER: Wanted = [(ref, "node") for ref in range(10) for _ in range(3)]
IN_TURNS: Wanted = [((worker, block), "node") for block in range(3) for _ in range(2) for worker in range(6)]


class Direct:
    """Notes what is asked for, and what is under way."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.under_way: set[object] = set()
        self.most = 0

    def fetch(self, ref: object, node: str, rows: None) -> Callable[[], object]:
        self.asked.append(ref)
        self.under_way.add(ref)
        self.most = max(self.most, len(self.under_way))

        def block() -> object:
            self.under_way.remove(ref)
            return "block", ref

        return block


@pytest.mark.parametrize("wanted", [IN_ORDER, IN_TURNS, IN_ORDER[:1], []], ids=["in order", "in turns", "one", "none"])
def test_a_few_blocks_are_on_their_way_and_each_comes_once(wanted: Wanted) -> None:
    direct = Direct()
    ahead = BlocksAhead(direct, wanted)  # type: ignore[arg-type]
    assert [ahead.block(ref) for ref, _ in wanted] == [("block", ref) for ref, _ in wanted]
    assert direct.asked == list(dict.fromkeys(ref for ref, _ in wanted))
    assert direct.most <= AT_ONCE
    assert not direct.under_way
    assert not ahead._here, "a block that nobody will ask for again is let go"
