"""Which nodes would be late with what they hold, from what workers took of each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.feed.pace import FIRST_BYTES, LINK_S, BlockRoom, Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(taken: dict[str, int], *, seconds: int = 30) -> tuple[Pace, Clock]:
    """The pace after so many seconds, in each of which workers took this."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(seconds):
        clock.now += 1.0
        pace.carried(taken, more=True)
    return pace, clock


def room(
    pace: Pace,
    here: float,
    left: float,
    *,
    near: float,
    node: str = "far",
    travelling: float = 0.0,
    made: float = 0.0,
    others: float = 0.0,
    makes: float = 1e12,
) -> BlockRoom:
    return pace.room(
        node,
        held_bytes=here - made - travelling,
        travelling_bytes=travelling,
        made_bytes=made,
        far_bytes=here + others,
        near=("near",),
        left_bytes=left,
        near_bytes_per_s=near,
        makes_bytes_per_s=makes,
    )


def late(pace: Pace, here: float, left: float, *, near: float, **more: Any) -> bool:
    return room(pace, here, left, near=near, **more).most_bytes <= 0


@given(
    near=st.integers(1, 10**9),
    far=st.integers(1, 10**9),
    left=st.integers(0, 10**12),
    seconds=st.integers(5, 60),
    made=st.floats(0, 0.5),
    travelling=st.floats(0, 0.5),
)
def test_a_block_has_room_if_its_link_carries_all_before_the_near_ones_have_made_the_rest(
    near: int, far: int, left: int, seconds: int, made: float, travelling: float
) -> None:
    pace, _ = paced({"far": far}, seconds=seconds)
    in_time = left / near * far
    here = 0.5 * in_time
    found = room(pace, here, left, near=near, made=made * here, travelling=travelling * here)
    assert found.most_bytes <= left
    assert (here + found.most_bytes) / far <= (left - found.most_bytes) / near * 1.06 + 1e-6
    assert (here + found.most_bytes) / far >= (left - found.most_bytes) / near * 0.85 - 1e-6
    assert late(pace, 1.06 * in_time + 1, left, near=near, made=in_time * made, travelling=in_time * travelling)


def test_a_block_takes_its_link_a_second() -> None:
    pace, _ = paced({"far": 100})
    assert room(pace, 1, 1e9, near=1).good_bytes == pytest.approx(100 * LINK_S, rel=0.1)
    assert room(pace, 0, 1e9, near=1, node="new").good_bytes == FIRST_BYTES


def test_a_link_that_carries_all_that_its_node_makes_delays_nothing() -> None:
    pace, _ = paced({"far": 100})
    assert not late(pace, 1e9, 1.0, near=1e6, made=1e9, makes=100)
    assert late(pace, 1e9, 1.0, near=1e6, made=1e9, makes=1000)
    assert late(pace, 1e9, 1.0, near=1e6, makes=100), "blocks wait for the link"


def test_what_other_nodes_hold_delays_a_node_too() -> None:
    pace, _ = paced({"far": 100, "other": 100})
    assert not late(pace, 80, 100, near=100, others=80)
    assert late(pace, 80, 100, near=100, others=140)
    assert late(pace, 170, 100, near=100, others=0), "far more than its own share"


def test_a_pause_of_the_workers_does_not_make_a_node_late() -> None:
    pace, clock = paced({"far": 100})
    clock.now += 1000
    pace.carried({"far": 100}, more=True)
    assert not late(pace, 80, 100, near=100)
    assert late(pace, 130, 100, near=100)


def test_a_node_of_which_nothing_has_arrived_is_late_once_it_holds_something() -> None:
    pace, _ = paced({"far": 5})
    assert not late(pace, 1e9, 1.0, near=5, node="new", made=1e9)
    assert late(pace, 1.0, 1e9, near=5, node="new")
    assert late(pace, 1.0, 1e9, near=5, node="new", travelling=1.0)


def test_a_link_that_carries_nothing_keeps_its_pace() -> None:
    pace, clock = paced({"far": 100})
    before = room(pace, 1, 1e9, near=1)
    for _ in range(100):
        clock.now += 1
        pace.carried({}, more=False)
    assert room(pace, 1, 1e9, near=1) == before


def test_old_measurements_fade() -> None:
    pace, clock = paced({"far": 100})
    for _ in range(60):
        clock.now += 1
        pace.carried({"far": 1}, more=True)
    assert late(pace, 5, 100, near=100)
