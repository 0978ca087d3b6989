"""What preprocessing costs, over nodes whose cores are not alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.sizing import for_speed, plan_tasks
from offload.pipeline.pool.task import Block, Cost

ROWS = 100


def block(node: str, wall_s: float, cpu_s: float | None = None, blocked_s: float = math.nan) -> Block:
    ref: Any = None
    cpu_s = wall_s if cpu_s is None else cpu_s
    cost = Cost(rows=ROWS, size_bytes=ROWS, cpu_s=cpu_s, wall_s=wall_s, blocked_s=blocked_s)
    return Block(ref=ref, cost=cost, node=node)


def test_the_ceiling_counts_each_node_at_its_own_cores_cost() -> None:
    meter = Meter(lambda: {"fast": 2, "slow": 4})
    for _ in range(6):  # the fast ones finish more tasks, which must not make all cores seem fast
        meter.add(block("fast", 1.0))
    for _ in range(3):
        meter.add(block("slow", 2.0))
    assert meter.summary()["input_ceiling_samples_per_s"] == pytest.approx(2 * 100 + 4 * 50)


def test_what_tasks_wait_for_counts_by_the_clock_and_not_in_the_ceiling() -> None:
    meter = Meter(lambda: {"near": 2, "far": 4, "new": 1})
    for _ in range(3):
        meter.add(block("near", 1.0, cpu_s=0.5))
        meter.add(block("far", 2.0, cpu_s=0.5))
    summary = meter.summary()
    assert summary["input_ceiling_samples_per_s"] == pytest.approx(7 * 200)
    assert summary["input_pace_samples_per_s"] == pytest.approx(2 * 100 + 4 * 50 + ROWS / 1.5)


def test_the_share_of_time_in_which_tasks_are_blocked() -> None:
    meter = Meter(lambda: {"near": 1})
    for blocked_s in (1.0, 1.2, 1.4):
        meter.add(block("near", 2.0, cpu_s=0.5, blocked_s=blocked_s))
    assert meter.summary()["blocked"] == pytest.approx(0.6)
    unknown = Meter(lambda: {"near": 1})
    unknown.add(block("near", 2.0))
    assert "blocked" not in unknown.summary()


def of_search(wall_s: float, *, made: float) -> Block:
    """A task of which this share of samples was made here."""
    known = block("near", wall_s)
    return replace(known, cost=replace(known.cost, cache_bytes=int(1000 * (1 - made)), storage_bytes=int(1000 * made)))


def test_finished_samples_of_other_runs_do_not_make_tasks_large() -> None:
    meter = Meter(lambda: {"near": 4}, shared=True)
    for _ in range(20):
        meter.add(of_search(0.01, made=0.0))
    tasks = {"cores": 4, "first_rows": 64, "local_batch_size": 16}
    assert set(plan_tasks(10_000, rates=meter.rates(), **tasks)) == {16}  # as before anything is measured
    meter.add(of_search(4.0, made=0.4))
    for _ in range(10):
        meter.add(of_search(0.01, made=0.0))
    rates = meter.rates()
    assert rates is not None
    assert rates.core_seconds_per_sample == pytest.approx(10.0 / ROWS)
    # Of the last 16 tasks.
    assert meter.summary()["core_seconds_per_sample"] == pytest.approx((4.0 + 15 * 0.01) / 16 / ROWS)


def test_where_nothing_can_be_shared_tasks_are_sized_by_what_they_make() -> None:
    meter = Meter(lambda: {"near": 4}, shared=True)
    meter.add(block("near", 2.0))  # no cache, no bytes
    rates = meter.rates()
    assert rates is not None
    assert rates.core_seconds_per_sample == pytest.approx(2.0 / ROWS)


def test_the_usual_wait_for_a_tasks_first_file_is_known_for_sizing() -> None:
    meter = Meter(lambda: {"near": 1})
    made = block("near", 2.0)
    for first_wait_s in (0.1, 0.1, 0.9):
        meter.add(replace(made, cost=replace(made.cost, first_wait_s=first_wait_s)))
    rates = meter.rates()
    assert rates is not None
    assert rates.first_wait_s == pytest.approx(0.1)


def test_bytes_from_caches_and_from_storage_add_up_over_all_tasks() -> None:
    meter = Meter(lambda: {"near": 1})
    made = block("near", 2.0)
    meter.add(made)
    assert "cache_bytes" not in meter.summary()
    for _ in range(100):  # more than count as recent
        meter.add(replace(made, cost=replace(made.cost, cache_bytes=3, storage_bytes=1)))
    assert (meter.summary()["cache_bytes"], meter.summary()["storage_bytes"]) == (300, 100)


def test_speeds_are_by_the_clock_and_relative_to_the_mean_core() -> None:
    meter = Meter(lambda: {"whole": 1, "quarter": 1})
    for _ in range(2):
        meter.add(block("whole", 1.0, cpu_s=1.0))
        meter.add(block("quarter", 4.0, cpu_s=1.0))  # throttled to a quarter of the time
    speeds = meter.speeds()
    assert speeds["whole"] / speeds["quarter"] == pytest.approx(4.0)
    assert speeds["whole"] + speeds["quarter"] == pytest.approx(2.0)


def test_a_core_is_held_against_the_fastest_and_counts_as_slow_before_it_is_known() -> None:
    meter = Meter(lambda: {"whole": 1, "half": 1, "joins": 1})
    assert meter.over_fastest("joins") == 1.0  # nothing is known of any
    for _ in range(3):
        meter.add(block("whole", 1.0))
        meter.add(block("half", 2.0))
    assert meter.over_fastest("whole") == 1.0
    assert meter.over_fastest("half") == pytest.approx(0.5)
    assert meter.over_fastest("joins") < 0.5
    meter.add(block("joins", 1.0))
    assert meter.over_fastest("joins") == 1.0


def test_one_lucky_node_of_many_makes_none_of_the_others_slow() -> None:
    nodes = {f"n{i}": 1 for i in range(30)}
    meter = Meter(lambda: nodes)
    for node in nodes:
        meter.add(block(node, 0.1 if node == "n7" else 1.0))
    assert {meter.over_fastest(node) for node in nodes} == {1.0}


def test_a_node_that_left_is_forgotten() -> None:
    cores = {"a": 1, "b": 1}
    meter = Meter(lambda: cores)
    for node in ("a", "b"):
        meter.add(block(node, 1.0))
    assert set(meter.speeds()) == {"a", "b"}
    del cores["a"]
    meter.reshaped()
    cores["a"] = 1  # another machine at the same place
    assert set(meter.speeds()) == {"b"}


@given(size=st.integers(1, 10_000), speed=st.floats(0.001, 10), local=st.integers(1, 512))
def test_a_task_for_a_slow_core_is_smaller_and_never_empty(size: int, speed: float, local: int) -> None:
    rows = for_speed(size, speed, local)
    assert 1 <= rows <= size
    if speed >= 1:
        assert rows == size
    if rows >= local and rows < size:
        assert rows % local == 0


def test_the_cpu_time_of_each_node_adds_up_and_outlives_the_node() -> None:
    cores = {"a": 1, "b": 2}
    meter = Meter(lambda: cores)
    for _ in range(20):
        meter.add(block("a", 1.0, cpu_s=0.5))
        meter.add(block("b", 1.0, cpu_s=0.25))
    meter.add(block("", 1.0))  # by an engine that does not tell the node
    assert meter.cpu_s() == {"a": pytest.approx(10.0), "b": pytest.approx(5.0)}
    del cores["b"]
    meter.reshaped()
    assert meter.cpu_s()["b"] == pytest.approx(5.0)
