"""Allotment of a pass's blocks to ranks: nothing lost, nothing twice, all ranks level, blocks whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.order.allot import NEAR_AHEAD, Allotment, Share, Stripes, level

blocks = st.lists(st.integers(0, 60), max_size=40)
worlds = st.integers(1, 7)
near_ranks = st.lists(st.sets(st.integers(0, 6), max_size=3), min_size=1, max_size=40)


def allot(
    world_size: int, sizes: list[int], *, known: bool, near: list[set[int]] | None = None
) -> tuple[Allotment, list[Share]]:
    allotment = Allotment(world_size, sum(sizes) if known else None)
    nears = itertools.cycle(near or [set()])
    shares = [share for size, near_it in zip(sizes, nears, strict=False) for share in allotment.add(size, near_it)]
    return allotment, shares + allotment.finish()


def rows_of(shares: list[Share], rank: int) -> int:
    return sum(share.rows for share in shares if share.rank == rank)


@settings(deadline=None)
@given(world_size=worlds, sizes=blocks, known=st.booleans(), near=near_ranks)
def test_every_row_of_every_block_goes_to_exactly_one_rank(
    world_size: int, sizes: list[int], known: bool, near: list[set[int]]
) -> None:
    allotment, shares = allot(world_size, sizes, known=known, near=near)
    given_out = sorted((share.block, row) for share in shares for row in range(share.start, share.stop))
    assert given_out == [(block, row) for block, size in enumerate(sizes) for row in range(size)]
    assert all(share.rows > 0 and 0 <= share.rank < world_size for share in shares)
    assert allotment.rows == [rows_of(shares, rank) for rank in range(world_size)]


@settings(deadline=None)
@given(world_size=worlds, sizes=blocks, near=near_ranks)
def test_with_a_known_total_ranks_are_level_and_nothing_waits(
    world_size: int, sizes: list[int], near: list[set[int]]
) -> None:
    allotment = Allotment(world_size, sum(sizes))
    for number, size in enumerate(sizes):
        shares = allotment.add(size, near[number % len(near)])
        assert sum(share.rows for share in shares) == size
        assert {share.block for share in shares} <= {number}
    assert allotment.finish() == []
    assert max(allotment.rows) - min(allotment.rows) <= 1


@settings(deadline=None)
@given(world_size=worlds, sizes=blocks)
def test_with_an_unknown_total_the_last_blocks_level_the_ranks_where_they_suffice(
    world_size: int, sizes: list[int]
) -> None:
    allotment = Allotment(world_size, None)
    for size in sizes:
        allotment.add(size)
    before = list(allotment.rows)
    held = sum(sizes) - sum(before)
    allotment.finish()
    gap = sum(max(before) - rows for rows in before)
    if held >= gap:
        assert max(allotment.rows) - min(allotment.rows) <= 1
    else:  # then nothing goes to the rank that has most already
        assert max(allotment.rows) == max(before)


@settings(deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=60), size=st.integers(1, 50))
def test_a_rank_gets_the_blocks_of_its_own_node_unless_another_lags(order: list[int], size: int) -> None:
    allotment = Allotment(4, 1000 * size)
    for rank in order:
        before = list(allotment.rows)
        (share,) = allotment.add(size, {rank})
        if before[rank] - min(before) < NEAR_AHEAD * size:
            assert share.rank == rank
        else:
            assert before[share.rank] == min(before)
    assert max(allotment.rows) - min(allotment.rows) <= NEAR_AHEAD * size


@settings(deadline=None)
@given(world_size=worlds, size=st.integers(1, 50), count=st.integers(0, 40), last=st.integers(0, 50))
def test_blocks_of_one_size_always_suffice(world_size: int, size: int, count: int, last: int) -> None:
    allotment, _ = allot(world_size, [size] * count + [min(last, size)] * (last > 0), known=False)
    assert max(allotment.rows) - min(allotment.rows) <= 1


@settings(deadline=None)
@given(world_size=worlds, sizes=blocks, known=st.booleans())
def test_only_the_last_few_blocks_are_cut(world_size: int, sizes: list[int], known: bool) -> None:
    _, shares = allot(world_size, sizes, known=known)
    for block, size in enumerate(sizes):
        pieces = [share for share in shares if share.block == block]
        if len(pieces) > 1:
            # A block is cut only where what is left of the pass, itself included, is less than such a block per rank
            # (known), or where it is among the last `world_size` blocks (unknown).
            left = sum(sizes[block:])
            assert left < world_size * (size + 1) if known else block >= len(sizes) - world_size


def test_early_blocks_spread_over_the_ranks() -> None:
    # No rank may starve at the start of a pass: the first blocks go to different ranks.
    allotment = Allotment(4, 4000)
    assert [allotment.add(100)[0].rank for _ in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_more_rows_than_the_total_is_a_defect() -> None:
    allotment = Allotment(2, 10)
    allotment.add(8)
    with pytest.raises(ValueError, match="10 rows got 11"):
        allotment.add(3)


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=8), extra=st.integers(0, 200))
def test_level_pours_onto_the_lowest(rows: list[int], extra: int) -> None:
    goal = level(rows, extra)
    assert sum(goal) == sum(rows) + extra
    assert all(after >= before for after, before in zip(goal, rows, strict=True))
    risen = [after for after, before in zip(goal, rows, strict=True) if after > before]
    # Whoever got something ends at the lowest level, give or take one row.
    assert not risen or max(risen) - min(goal) <= 1


@settings(deadline=None)
@given(
    data=st.data(),
    world_size=worlds,
    local=st.integers(1, 9),
    total=st.integers(0, 300),
)
def test_striped_global_batches_hold_the_same_rows_whatever_the_ranks_and_blocks(
    data: st.DataObject, world_size: int, local: int, total: int
) -> None:
    batch = world_size * local
    stripes = Stripes(world_size, batch, total)
    of_rank: list[list[int]] = [[] for _ in range(world_size)]
    at = 0
    while at < total:
        size = data.draw(st.integers(1, total - at))
        for share in stripes.add(size):
            of_rank[share.rank] += range(at + share.start, at + share.stop)
        at += size
    for number in range(total // batch):
        held = [row for rows in of_rank for row in rows[number * local : (number + 1) * local]]
        assert sorted(held) == list(range(number * batch, (number + 1) * batch))
    rest = [len(rows) - total // batch * local for rows in of_rank]
    assert max(rest) - min(rest) <= 1


def test_stripes_need_ranks_that_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot share batches of 16 rows"):
        Stripes(3, 16, 100)
