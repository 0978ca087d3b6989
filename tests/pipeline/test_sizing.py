"""Sizes of preprocessing tasks: a soon first batch, long tasks in the middle, no core idle at the end."""

from __future__ import annotations

import heapq
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.model.blocks import (
    BLOCK_BYTES,
    BLOCK_HUB_S,
    HUB_ROOM,
    LONGEST_TASK_S,
    TASK_S,
    block_rows,
    most_block_bytes,
)
from offload.pipeline.feed.sizing import (
    PLAN_TASKS_PER_CORE,
    WAITING,
    SampleCost,
    aligned,
    block_bytes,
    block_room,
    plan_tasks,
    rows_per_task,
)

MIB = 1 << 20

rates_ = st.builds(
    SampleCost,
    core_seconds_per_sample=st.floats(1e-6, 20.0),
    bytes_per_sample=st.floats(0.0, 1e9),
)
anything = {
    "remaining": st.integers(0, 200_000),
    "cores": st.integers(1, 96),
    "first_rows": st.integers(1, 8192),
    "rates": st.none() | rates_,
    "block_bytes": st.integers(MIB, BLOCK_BYTES),
}


@settings(deadline=None)
@given(**anything)
def test_a_plan_never_asks_for_more_than_is_left(
    remaining: int, cores: int, first_rows: int, rates: SampleCost | None, block_bytes: int
) -> None:
    sizes = plan_tasks(remaining, cores=cores, first_rows=first_rows, rates=rates, block_bytes=block_bytes)
    assert all(size >= 1 for size in sizes)
    assert sum(sizes) <= remaining
    assert bool(sizes) == (remaining > 0)


@settings(deadline=None, max_examples=40)
@given(**{**anything, "remaining": st.integers(0, 20_000)})
def test_planning_again_and_again_covers_everything(
    remaining: int, cores: int, first_rows: int, rates: SampleCost | None, block_bytes: int
) -> None:
    measured: SampleCost | None = None
    rounds = 0
    while remaining:
        sizes = plan_tasks(remaining, cores=cores, first_rows=first_rows, rates=measured, block_bytes=block_bytes)
        remaining -= sum(sizes)
        measured = rates
        rounds += 1
        assert rounds <= 20_000
    assert remaining == 0


@settings(deadline=None)
@given(cores=st.integers(1, 96), first_rows=st.integers(1, 8192))
def test_before_anything_is_measured_each_core_makes_its_share_of_the_first_batch(cores: int, first_rows: int) -> None:
    sizes = plan_tasks(10**9, cores=cores, first_rows=first_rows, rates=None)
    assert len(sizes) == cores
    assert len(set(sizes)) == 1
    assert first_rows <= sum(sizes) < first_rows + cores


@settings(deadline=None)
@given(rates=rates_, limit=st.integers(MIB, BLOCK_BYTES))
def test_a_task_is_as_long_as_it_may_be(rates: SampleCost, limit: int) -> None:
    rows = rows_per_task(rates, limit)
    limit = int(block_room(limit, rates, 1))
    assert rows >= 1
    work_s, size = rows * rates.core_seconds_per_sample, rows * rates.bytes_per_sample
    if rows > 1:
        assert work_s <= TASK_S * (1 + 1e-9)
        assert size <= limit * (1 + 1e-9)
    # One row more would break one of the bounds: the task is as long as it may be.
    almost = 1 - 1e-9
    longer_s, larger = (rows + 1) * rates.core_seconds_per_sample, (rows + 1) * max(rates.bytes_per_sample, 1)
    assert longer_s > TASK_S * almost or larger > limit * almost


@settings(deadline=None)
@given(first_wait_s=st.floats(0.0, 100.0), core_s=st.floats(1e-4, 0.3))
def test_tasks_are_so_long_that_the_wait_for_their_first_file_costs_little(first_wait_s: float, core_s: float) -> None:
    rows = rows_per_task(SampleCost(core_seconds_per_sample=core_s, bytes_per_sample=1.0, first_wait_s=first_wait_s))
    at_once = rows_per_task(SampleCost(core_seconds_per_sample=core_s, bytes_per_sample=1.0))
    assert rows >= at_once
    if first_wait_s <= WAITING * TASK_S:
        assert rows == at_once
    assert rows * core_s <= LONGEST_TASK_S * (1 + 1e-9)
    if rows * core_s < LONGEST_TASK_S - core_s:
        assert first_wait_s <= WAITING * (rows + 1) * core_s * (1 + 1e-9)


@settings(deadline=None)
@given(cores=st.integers(1, 4000), core_s=st.floats(1e-4, 0.3))
def test_tasks_of_many_cores_are_so_long_that_one_hub_keeps_up(cores: int, core_s: float) -> None:
    rates = SampleCost(core_seconds_per_sample=core_s, bytes_per_sample=1.0)
    (size,) = set(plan_tasks(10**18, cores=cores, first_rows=256, rates=rates, local_batch_size=32))
    blocks_per_s = cores / (size * core_s)
    assert blocks_per_s * BLOCK_HUB_S <= 1 + max(core_s, 32 * core_s) / (size * core_s)
    if BLOCK_HUB_S * cores <= TASK_S:
        assert size == plan_tasks(10**12, cores=1, first_rows=256, rates=rates, local_batch_size=32)[0]


@settings(deadline=None)
@given(rates=rates_, usual=st.integers(MIB, BLOCK_BYTES), cores=st.integers(1, 4000))
def test_blocks_outgrow_the_usual_room_only_as_far_as_one_hub_needs(rates: SampleCost, usual: int, cores: int) -> None:
    room = block_room(usual, rates, cores)
    assert usual <= room <= HUB_ROOM * usual
    size = max(rates.bytes_per_sample, 1.0)
    if usual < room:
        # A smaller block would make the hub more than half busy: it is less work than a block's time in the hub, for all cores.
        work_s = room / size * rates.core_seconds_per_sample
        assert work_s <= BLOCK_HUB_S * cores * (1 + 1e-6)
    elif room > size:
        assert room / size * rates.core_seconds_per_sample >= BLOCK_HUB_S * cores * (1 - 1e-6)
    rows = rows_per_task(rates, usual, cores=cores)
    assert rows == 1 or rows * size <= room * (1 + 1e-9)


@settings(deadline=None)
@given(cores=st.integers(1, 32), rates=rates_)
def test_in_the_middle_of_a_pass_all_tasks_are_full_and_a_plan_holds_a_few_for_each_core(
    cores: int, rates: SampleCost
) -> None:
    sizes = plan_tasks(10**18, cores=cores, first_rows=256, rates=rates)
    assert set(sizes) == {rows_per_task(rates, cores=cores)}
    assert len(sizes) == PLAN_TASKS_PER_CORE * cores


@settings(deadline=None)
@given(
    cores=st.integers(1, 32),
    full=st.integers(1, 400),
    waves=st.integers(1, PLAN_TASKS_PER_CORE - 1),
    odd=st.integers(0, 399),
)
def test_at_the_end_tasks_shrink_so_that_no_core_waits_long_for_another(
    cores: int, full: int, waves: int, odd: int
) -> None:
    rates = SampleCost(core_seconds_per_sample=TASK_S / full * (1 - 1e-9), bytes_per_sample=1.0)
    assert rows_per_task(rates) == full
    remaining = cores * full * waves + min(odd, full - 1)
    sizes = plan_tasks(remaining, cores=cores, first_rows=1, rates=rates)
    assert sum(sizes) == remaining
    assert sizes == sorted(sizes, reverse=True)
    # Whichever core is free takes the next task: the last one ends at most a quarter task after the ideal.
    ends = [0] * cores
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size)
    assert max(ends) <= math.ceil(remaining / cores) + max(1, math.ceil(full / 4))


@settings(deadline=None)
@given(
    cores=st.integers(1, 32),
    local_batch_size=st.integers(1, 512),
    full=st.integers(1, 4000),
    remaining=st.integers(1, 10**7),
)
def test_full_tasks_hold_whole_local_batches(cores: int, local_batch_size: int, full: int, remaining: int) -> None:
    rates = SampleCost(core_seconds_per_sample=TASK_S / full * (1 - 1e-9), bytes_per_sample=1.0)
    sizes = plan_tasks(remaining, cores=cores, first_rows=64, rates=rates, local_batch_size=local_batch_size)
    if remaining <= max(full, local_batch_size) * cores * PLAN_TASKS_PER_CORE:
        return  # it may taper
    (size,) = set(sizes)
    work_s = size * rates.core_seconds_per_sample
    if size % local_batch_size:
        assert size == full, "nor is it as long as the time it is to take"
        assert local_batch_size * rates.core_seconds_per_sample > LONGEST_TASK_S
    else:
        assert work_s <= (TASK_S if size > local_batch_size else LONGEST_TASK_S)
        assert work_s > TASK_S / 2


@given(rows=st.integers(0, 10**6), batches=st.integers(1, 20), rest=st.integers(0, 511), local=st.integers(1, 512))
def test_a_rank_that_has_part_of_a_batch_comes_to_whole_ones(rows: int, batches: int, rest: int, local: int) -> None:
    size = aligned(batches * local, rows, local)
    assert 0 < size <= batches * local
    assert (rows + size) % local == 0
    assert (
        aligned(rest % local, rows, local) == rest % local
    )  # too small to make a batch whole: as soon as it was to come


def test_a_local_batch_that_outgrows_a_block_is_not_made_in_one_task() -> None:
    rates = SampleCost(core_seconds_per_sample=TASK_S / 40, bytes_per_sample=MIB)
    assert set(plan_tasks(10**6, cores=2, first_rows=64, rates=rates, local_batch_size=64, block_bytes=64 * MIB)) == {
        64
    }
    assert set(plan_tasks(10**6, cores=2, first_rows=64, rates=rates, local_batch_size=64, block_bytes=63 * MIB)) == {
        40
    }


def test_a_small_object_store_bounds_the_blocks() -> None:
    assert block_bytes(1e12, 4) == BLOCK_BYTES
    assert block_bytes(120 * MIB, 2) == 5 * MIB  # a dozen blocks a core fit
    assert block_bytes(1.0, 64) == MIB


@settings(deadline=None)
@given(store=st.floats(1, 1e12), cores=st.integers(1, 128))
def test_a_dozen_blocks_a_core_fit_into_the_store(store: float, cores: int) -> None:
    size = block_bytes(store, cores)
    assert MIB <= size <= BLOCK_BYTES
    assert size == MIB or 12 * cores * size <= store * (1 + 1e-9)


@settings(deadline=None)
@given(
    cost=st.builds(SampleCost, core_seconds_per_sample=st.floats(1e-6, 20.0), bytes_per_sample=st.floats(1.0, 1e9)),
    cores=st.integers(1, 5000),
    store=st.floats(1e8, 1e14),
    local=st.integers(1, 4096),
)
def test_full_tasks_are_as_large_as_a_plan_expects(cost: SampleCost, cores: int, store: float, local: int) -> None:
    room = block_bytes(store, cores)
    assert int(most_block_bytes(store, cores)) == room
    tasks = plan_tasks(10**18, cores=cores, first_rows=1, rates=cost, block_bytes=room, local_batch_size=local)
    expected = block_rows(cost.core_seconds_per_sample, cost.bytes_per_sample, cores, room, local)
    assert set(tasks) == {int(expected)}
