"""Where the time of a step goes, on clocks that the tests move."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.measure.steps import StepClock, StepMeter, StepTimes, Totals
from offload.train.driver.event_log import rates_of


class Hands(StepClock):
    """A clock that stands still until it is moved. Marks may become known later, as a GPU's do."""

    def __init__(self) -> None:
        self.at = 0.0
        self.known_until = float("inf")

    def mark(self) -> float:
        return self.at

    def elapsed(self, start: Any, end: Any) -> float | None:
        return end - start if end <= self.known_until else None


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def meter(hands: Hands) -> StepMeter:
    return StepMeter(hands, now=lambda: hands.at)


def batch(
    hands: Hands,
    meter: StepMeter,
    *,
    wait: float = 0.0,
    peer: float = 0.0,
    compute: float = 0.0,
    sync: float | None = None,
    samples: int = 8,
) -> None:
    """One micro-batch, as the training loop goes through it."""
    hands.at += wait + peer
    meter.waited(wait, peer, samples)
    hands.at += compute
    if sync is not None:
        meter.last_gradient()
        hands.at += sync
        meter.backward_done()


def test_wait_peers_compute_and_sync_are_told_apart(hands: Hands, meter: StepMeter) -> None:
    batch(hands, meter, wait=1.0, peer=2.0, compute=4.0, sync=8.0)
    hands.at += 16.0  # the optimizer
    meter.stepped()
    assert meter.totals() == Totals(
        steps=1, samples=8, step_time_s=31.0, data_wait_s=1.0, peer_wait_s=2.0, compute_s=20.0, sync_s=8.0, useful=8.0
    )


def test_without_gradients_to_reduce_there_is_no_sync(hands: Hands, meter: StepMeter) -> None:
    batch(hands, meter, wait=1.0, compute=4.0)
    meter.backward_done()
    meter.stepped()
    assert (meter.totals().compute_s, meter.totals().sync_s) == (4.0, 0.0)


def test_only_what_backward_did_not_hide_is_sync(hands: Hands, meter: StepMeter) -> None:
    meter.waited(0.0, 0.0, 8)
    for _ in range(3):  # buckets are reduced while backward goes on
        hands.at += 2.0
        meter.last_gradient()
    hands.at += 0.5
    meter.backward_done()
    meter.stepped()
    assert (meter.totals().compute_s, meter.totals().sync_s) == (6.0, 0.5)


def test_an_exchange_ends_before_the_next_backward_pass(hands: Hands, meter: StepMeter) -> None:
    """Two models that step one after the other: the forward pass between their exchanges is computing."""
    meter.waited(0.0, 0.0, 8)
    for _ in range(2):
        hands.at += 2.0
        meter.backward_done()  # of a loss, without an exchange
        meter.last_gradient()
        hands.at += 0.5
        meter.backward_done()
    meter.stepped()
    assert (meter.totals().compute_s, meter.totals().sync_s) == (4.0, 1.0)


def test_a_step_of_several_micro_batches(hands: Hands, meter: StepMeter) -> None:
    for _ in range(3):
        batch(hands, meter, wait=0.5, peer=0.25, compute=2.0, samples=5)
        meter.micro_batch_done()
        hands.at += 10.0  # between batches: in nobody's account but the step's
    batch(hands, meter, wait=0.5, peer=0.25, compute=2.0, sync=1.0, samples=4)
    meter.stepped()
    assert meter.totals() == Totals(
        steps=1, samples=19, step_time_s=42.0, data_wait_s=2.0, peer_wait_s=1.0, compute_s=8.0, sync_s=1.0, useful=19.0
    )


def test_the_wait_for_the_first_batch_of_a_pass_is_told_apart(hands: Hands, meter: StepMeter) -> None:
    for first in (True, False, False):
        hands.at += 5.0
        meter.waited(4.0, 1.0, 8, first=first)
        meter.stepped()
    totals = meter.totals()
    assert (totals.step_time_s, totals.data_wait_s, totals.pass_start_s) == (15.0, 12.0, 4.0)


def test_a_look_for_the_next_batch_is_not_computing(hands: Hands, meter: StepMeter) -> None:
    batch(hands, meter, compute=1.0)
    with meter.paused():
        hands.at += 5.0
    hands.at += 2.0
    meter.stepped()
    assert meter.totals().compute_s == 3.0
    assert meter.totals().step_time_s == 8.0


class Queue(StepClock):
    """A device that works through what its process queues, as a GPU does: a mark lies where the work before it ends."""

    def __init__(self, hands: Hands) -> None:
        self.hands, self.free_at = hands, 0.0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.hands.at) + seconds

    def mark(self) -> float:
        self.free_at = max(self.free_at, self.hands.at)
        return self.free_at


@settings(deadline=None)
@given(
    waits=st.lists(st.floats(0, 4), min_size=1, max_size=20),
    compute=st.floats(0.1, 3),
    peer=st.floats(0, 1),
    micro=st.booleans(),
)
def test_a_wait_counts_only_as_far_as_the_device_has_nothing_to_do(
    waits: list[float], compute: float, peer: float, micro: bool
) -> None:
    """The process queues a step at once and waits for the next batch, while the device is still busy with the one before."""
    hands = Hands()
    queue = Queue(hands)
    meter = StepMeter(queue, now=lambda: hands.at)
    idle = busy = 0.0
    for wait in waits:
        hands.at += wait + peer * wait
        idle += max(hands.at - queue.free_at, 0.0)
        meter.waited(wait, peer * wait, 8)
        queue.work(compute)
        busy += compute
        if micro:
            meter.micro_batch_done()
            meter.waited(0.0, 0.0, 8)
        meter.stepped()
    totals = meter.totals()
    assert totals.data_wait_s + totals.peer_wait_s == pytest.approx(idle)
    assert totals.peer_wait_s == pytest.approx(totals.data_wait_s * peer)
    assert totals.compute_s == pytest.approx(busy)
    assert totals.compute_s + totals.data_wait_s + totals.peer_wait_s == pytest.approx(queue.free_at)


def test_a_pause_is_no_part_of_a_step(hands: Hands, meter: StepMeter) -> None:
    batch(hands, meter, wait=1.0, compute=2.0)
    meter.stepped()
    hands.at += 50.0  # the user's own work before it
    with meter.outside():
        hands.at += 100.0  # a validation
    batch(hands, meter, wait=1.0, compute=2.0)
    meter.stepped()
    assert meter.totals().step_time_s == 6.0
    assert meter.totals().stall == pytest.approx(1 / 3)


def test_a_pause_within_a_step_leaves_what_the_step_has_measured(hands: Hands, meter: StepMeter) -> None:
    """A report before ctx.step(), or between micro-batches, and one within a validation."""
    batch(hands, meter, wait=1.0, compute=2.0)
    with meter.outside():
        hands.at += 100.0
        with meter.outside():
            hands.at += 10.0
    hands.at += 3.0
    meter.micro_batch_done()
    with meter.outside():
        hands.at += 100.0
    batch(hands, meter, wait=1.0, compute=2.0)
    meter.stepped()
    assert meter.totals() == Totals(
        steps=1, samples=16, step_time_s=9.0, data_wait_s=2.0, compute_s=7.0, sync_s=0.0, useful=16.0
    )


def test_a_pause_that_ends_in_a_later_step_takes_nothing_from_it(hands: Hands, meter: StepMeter) -> None:
    """A loop may break off a validation and keep its iterator."""
    for steps in (0, 1):
        before = meter.totals()
        with contextlib.ExitStack() as kept:
            kept.enter_context(meter.outside())
            for _ in range(steps):
                batch(hands, meter, compute=2.0)
                meter.stepped()
            batch(hands, meter, compute=2.0)
        meter.stepped()
        found = meter.totals().minus(before)
        assert (found.step_time_s, found.compute_s) == (2.0 * (steps + 1), 2.0 * (steps + 1))


def test_without_a_restart_time_between_steps_belongs_to_the_next(hands: Hands, meter: StepMeter) -> None:
    for _ in range(2):
        hands.at += 1.0
        batch(hands, meter, compute=2.0)
        meter.stepped()
    assert meter.totals().step_time_s == hands.at == 6.0


def test_a_step_that_was_begun_is_forgotten_at_a_restart(hands: Hands, meter: StepMeter) -> None:
    batch(hands, meter, wait=9.0, peer=9.0, compute=9.0, sync=9.0)
    meter.restart()
    batch(hands, meter, compute=1.0, samples=3)
    meter.stepped()
    assert meter.totals() == Totals(steps=1, samples=3, step_time_s=1.0, compute_s=1.0, useful=3.0)


def test_steps_wait_until_the_device_has_told_their_times(hands: Hands, meter: StepMeter) -> None:
    for _ in range(3):
        batch(hands, meter, wait=1.0, compute=4.0, sync=1.0)
        meter.stepped()
    hands.known_until = 0.0
    assert meter.totals() == Totals()
    hands.known_until = 12.0
    assert meter.totals().steps == 2
    assert meter.totals().steps == 2  # counted once
    hands.known_until = 18.0
    assert meter.totals() == Totals(
        steps=3, samples=24, step_time_s=18.0, data_wait_s=3.0, compute_s=12.0, sync_s=3.0, useful=24.0
    )


times = st.floats(0, 100)
steps = st.lists(
    st.lists(st.tuples(times, times, times, st.none() | times, st.integers(0, 64)), min_size=1, max_size=4), max_size=8
)


@settings(deadline=None)
@given(steps=steps)
def test_the_parts_of_a_step_make_the_step(steps: list[list[tuple[float, float, float, float | None, int]]]) -> None:
    hands = Hands()
    meter = StepMeter(hands, now=lambda: hands.at)
    for micro_batches in steps:
        for number, (wait, peer, compute, sync, samples) in enumerate(micro_batches):
            batch(hands, meter, wait=wait, peer=peer, compute=compute, sync=sync, samples=samples)
            if number < len(micro_batches) - 1:
                meter.micro_batch_done()
        meter.stepped()
    totals = meter.totals()
    flat = [m for micro_batches in steps for m in micro_batches]
    assert totals.steps == len(steps)
    assert totals.samples == sum(m[4] for m in flat)
    assert totals.data_wait_s == pytest.approx(sum(m[0] for m in flat))
    assert totals.peer_wait_s == pytest.approx(sum(m[1] for m in flat))
    assert totals.sync_s == pytest.approx(sum(m[3] or 0.0 for m in flat), abs=1e-6)
    assert totals.compute_s == pytest.approx(sum(m[2] for m in flat), abs=1e-6)
    parts = totals.data_wait_s + totals.peer_wait_s + totals.compute_s + totals.sync_s
    assert totals.step_time_s == pytest.approx(parts, abs=1e-6)
    assert 0 <= totals.stall <= 1 + 1e-9


def test_totals_add_and_subtract() -> None:
    step = StepTimes(
        step_time_s=2.0,
        data_wait_s=0.5,
        peer_wait_s=0.25,
        compute_s=1.0,
        sync_s=0.25,
        samples=8,
        pass_start_s=0.1,
        useful=6.0,
    )
    one = Totals().add(step)
    assert one.plus(one) == one.add(step)
    assert one.plus(one).minus(one) == one
    assert dataclasses.asdict(one) == {"steps": 1, **dataclasses.asdict(step)}
    assert one.stall == 0.25
    assert Totals().stall == 0.0


STEPS = st.lists(
    st.tuples(st.floats(0.001, 100.0), st.integers(1, 4096), st.floats(0.01, 1.0)), min_size=1, max_size=20
)


@settings(max_examples=100)
@given(groups=st.lists(st.tuples(st.integers(1, 8), STEPS), min_size=1, max_size=4))
def test_goodput_is_throughput_times_efficiency(groups: list[tuple[int, list[tuple[float, int, float]]]]) -> None:
    """Over any worker groups and steps: never above samples/s, equal to it where every sample is worth one, as at a fixed batch, and
    as many times smaller as samples are worth less."""

    def measured(of: Callable[[float], float]) -> dict[str, float]:
        found = []
        for workers, steps in groups:
            hands = Hands()
            meter = StepMeter(hands, now=lambda hands=hands: hands.at)  # type: ignore[misc]
            for seconds, samples, efficiency in steps:
                batch(hands, meter, compute=seconds, samples=samples)
                meter.stepped(of(efficiency))
            found.append((workers, meter.totals()))
        return rates_of(found)

    fixed, adaptive, half = measured(lambda _: 1.0), measured(lambda each: each), measured(lambda _: 0.5)
    assert fixed["goodput"] == fixed["samples_per_s"] > 0
    assert adaptive["samples_per_s"] == fixed["samples_per_s"] >= adaptive["goodput"] > 0
    assert half["goodput"] == fixed["goodput"] / 2
    assert rates_of([(1, Totals())]) == {"samples_per_s": 0.0, "goodput": 0.0}


def test_the_real_clock_is_monotonic() -> None:
    clock = StepClock()
    first, second = clock.mark(), clock.mark()
    elapsed = clock.elapsed(first, second)
    assert elapsed is not None
    assert 0 <= elapsed < 60
