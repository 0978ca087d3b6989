"""The paced accelerator takes exactly its nominal time on average, burns no CPU, and never calls itself a GPU."""

import time

import pytest

from offload.paced import PacedAccelerator


class LateSleeper:
    """A clock that only sleeps move, each by what was asked and a little more."""

    def __init__(self, late_s: float) -> None:
        self.now = 100.0
        self.late_s = late_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


def test_steps_in_a_row_take_exactly_their_nominal_time_however_late_sleeps_end() -> None:
    late = LateSleeper(late_s=0.003)
    accelerator = PacedAccelerator(0.01, 0.001, clock=late.clock, sleep=late.sleep)
    start = late.now
    for _ in range(100):
        accelerator.step(10)
    # The last step's own excess is all that may remain.
    assert late.now - start == pytest.approx(100 * 0.02, abs=0.0031)
    assert accelerator.busy_s == pytest.approx(2.0)
    assert accelerator.steps == 100


def test_a_step_longer_than_the_excess_never_becomes_negative() -> None:
    late = LateSleeper(late_s=0.5)
    accelerator = PacedAccelerator(0.1, 0.0, clock=late.clock, sleep=late.sleep)
    start = late.now
    for _ in range(12):
        accelerator.step(1)
    assert late.now - start == pytest.approx(1.2, abs=0.51)


def test_waiting_for_data_does_not_shorten_the_next_step() -> None:
    late = LateSleeper(late_s=0.004)
    accelerator = PacedAccelerator(0.02, 0.0, clock=late.clock, sleep=late.sleep)
    accelerator.step(1)
    late.now += 1.0
    before = late.now
    accelerator.step(1)
    assert late.now - before == pytest.approx(0.024)


def test_real_sleeps_burn_no_cpu_and_are_never_short() -> None:
    accelerator = PacedAccelerator(0.002, 0.0005)
    wall, cpu = time.monotonic(), time.process_time()
    for _ in range(50):
        accelerator.step(16)
    wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
    assert wall_s >= 50 * 0.010
    assert cpu_s < 0.25 * wall_s


def test_it_says_what_it_is() -> None:
    accelerator = PacedAccelerator(0.01, 0.001)
    assert accelerator.name == "paced accelerator"
    assert "paced accelerator" in repr(accelerator)
    assert "gpu" not in repr(accelerator).lower()


@pytest.mark.parametrize(("alpha_s", "beta_s"), [(-0.1, 0.0), (0.0, float("inf")), (float("nan"), 0.0)])
def test_impossible_times_are_refused(alpha_s: float, beta_s: float) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds"):
        PacedAccelerator(alpha_s, beta_s)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="local batch size must be ≥ 1, found 0"):
        PacedAccelerator(0.1, 0.1).step(0)
