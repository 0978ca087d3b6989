"""Which nodes would be late with what they hold, from what workers took of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.pace import Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(taken: dict[str, int], *, seconds: int = 30) -> tuple[Pace, Clock]:
    """The pace after so many seconds, in each of which workers took this."""
    clock = Clock()
    pace = Pace(clock)
    pace.carried(dict.fromkeys(taken, 0))
    for _ in range(seconds):
        clock.now += 1.0
        pace.carried(taken)
    return pace, clock


def late(
    pace: Pace, here: float, left: float, *, near: float, node: str = "far", made: float = 0.0, others: float = 0.0
) -> bool:
    return pace.would_be_late(
        node,
        held={node: here - made, "other": others},
        made={node: made, "other": 0.0},
        left_bytes=left,
        near_bytes_per_s=near,
    )


@given(
    near=st.integers(1, 10**9),
    far=st.integers(1, 10**9),
    left=st.integers(0, 10**12),
    seconds=st.integers(5, 60),
    made=st.floats(0, 1),
)
def test_a_node_is_late_if_the_near_ones_make_the_rest_before_its_link_is_free(
    near: int, far: int, left: int, seconds: int, made: float
) -> None:
    pace, _ = paced({"near": 3, "far": far}, seconds=seconds)
    in_time = left / near * far
    assert not late(pace, 0.94 * in_time, left, near=near, made=0.9 * in_time * made)
    assert late(pace, 1.06 * in_time + 1, left, near=near, made=in_time * made)


def test_what_other_nodes_hold_delays_a_node_too() -> None:
    pace, _ = paced({"far": 100, "other": 100})
    assert not late(pace, 80, 100, near=100, others=80)
    assert late(pace, 80, 100, near=100, others=140)
    assert late(pace, 170, 100, near=100, others=0), "far more than its own share"


def test_a_pause_of_the_workers_does_not_make_a_node_late() -> None:
    pace, clock = paced({"far": 100})
    clock.now += 1000
    pace.carried({"far": 100})
    assert not late(pace, 80, 100, near=100)
    assert late(pace, 130, 100, near=100)


def test_a_node_of_which_nothing_has_arrived_is_late_once_it_holds_something() -> None:
    pace, _ = paced({"near": 5})
    assert not late(pace, 1e9, 1.0, near=5, node="new", made=1e9)
    assert late(pace, 1.0, 1e9, near=5, node="new")


def test_without_near_nodes_none_is_late() -> None:
    pace, _ = paced({"far": 5, "other": 50})
    assert not late(pace, 1e9, 1.0, near=0)


def test_old_measurements_fade() -> None:
    pace, clock = paced({"far": 100})
    for _ in range(60):
        clock.now += 1
        pace.carried({"far": 1})
    assert late(pace, 5, 100, near=100)
