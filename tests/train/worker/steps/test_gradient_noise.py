"""The gradient-noise estimate: right on gradients whose noise is known, however many workers and micro-batches there are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from offload.adapt.noise_average import NoiseAverage
from offload.train.worker.links.agreement import NoisePart
from offload.train.worker.steps.gradient_noise import EAGER, EVERY, NoiseMeter, is_adam, moments_of

DIMENSIONS = 500
SQR, VAR, INITIAL = 10.0, 31.25, 16
LOCAL = 8


class Worker:
    """A parameter whose gradients are drawn: a mean of squared norm SQR, and noise whose covariance has trace VAR at a
    batch of INITIAL."""

    def __init__(self, seed: int, workers: int, optimizer: Any = torch.optim.SGD) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(DIMENSIONS))
        self.optimizer = optimizer([self.parameter], lr=0.1)
        self.meter = NoiseMeter([self.optimizer], workers)
        self.generator = torch.Generator().manual_seed(seed)
        self.mean = torch.zeros(DIMENSIONS)
        self.mean[0] = math.sqrt(SQR)

    def gradient(self, samples: int) -> torch.Tensor:
        spread = math.sqrt(VAR * INITIAL / samples / DIMENSIONS)
        return self.mean + spread * torch.randn(DIMENSIONS, generator=self.generator)

    def backward(self, micro_batches: int, losses: tuple[float, ...] = (1.0,)) -> None:
        """``losses``: the shares of several losses of a micro-batch, which are 1 together."""
        for _ in range(micro_batches):
            gradient = self.gradient(LOCAL)
            for share in losses:
                (self.parameter * gradient * share / micro_batches).sum().backward()
            self.meter.micro_batch_done()


def step_of(
    group: list[Worker], step: int, micro_batches: int, losses: tuple[float, ...] = (1.0,)
) -> list[NoisePart] | None:
    """One global batch of all workers, with their gradients averaged as DDP does."""
    for worker in group:
        worker.parameter.grad = None
        worker.meter.begin(step, micro_batches, lambda: 1.0)
        worker.backward(micro_batches, losses)
    mean = torch.stack([w.parameter.grad for w in group if w.parameter.grad is not None]).mean(0)
    parts = []
    for worker in group:
        worker.parameter.grad = mean.clone()
        parts.append(worker.meter.finish(step, local_batch_size=LOCAL, whole=True))
    found = [part for part in parts if part is not None]
    assert len(found) in (0, len(group))
    return found or None


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 1), (1, 4), (4, 1), (2, 2)])
def test_known_noise_is_found(workers: int, micro_batches: int) -> None:
    group = [Worker(100 * workers + rank, workers) for rank in range(workers)]
    scale = max(workers * micro_batches * LOCAL / INITIAL, 1.0)
    average, measured, estimates = NoiseAverage(batch_size=INITIAL), 0, []
    for step in range(3000):
        parts = step_of(group, step % EAGER, micro_batches)  # measured at every step, to have many estimates
        if parts is not None:
            sqr, var = moments_of([NoisePart.from_floats(p.to_floats()) for p in parts], INITIAL)
            average = average.updated(sqr, var, scale=scale, paired=parts[0].paired)
            measured += 1
            estimates.append((sqr[0], var[0]))
    assert measured > 2800
    assert np.mean(estimates, axis=0) == pytest.approx((SQR, VAR), rel=0.03)
    noise = average.whole
    assert noise is not None
    assert abs(noise.sqr - SQR) < 4 * noise.sqr_error < SQR
    assert noise.var == pytest.approx(VAR, rel=0.1)
    assert average.paired == (workers * micro_batches == 1)


def test_few_steps_are_measured_once_there_is_an_estimate() -> None:
    group = [Worker(1, 2), Worker(2, 2)]
    measured = [step for step in range(EAGER + 3 * EVERY) if step_of(group, step, 1) is not None]
    assert measured == [*range(EAGER), *range(EAGER, EAGER + 3 * EVERY, EVERY)]


def test_an_exchange_that_completes_a_smaller_batch_is_not_taken_for_another_loss() -> None:
    """Which would cost the memory of one more gradient from then on."""
    worker = Worker(1, 2)
    worker.meter.begin(0, 2, lambda: 1.0)
    worker.backward(1)
    worker.meter.leave_out()
    for _ in range(2):
        (worker.parameter * 0.0).sum().backward()
    assert worker.meter.finish(0, local_batch_size=LOCAL, whole=False) is None
    assert not worker.meter._adds_up


def test_a_step_with_a_smaller_batch_is_left_out() -> None:
    worker = Worker(1, 1)
    worker.meter.begin(0, 2, lambda: 1.0)
    worker.backward(2)
    assert worker.meter.finish(0, local_batch_size=LOCAL, whole=False) is None


def test_what_fp16_multiplied_is_divided_again() -> None:
    plain, scaled = Worker(3, 1), Worker(3, 1)
    (one,) = step_of([plain], 0, 2) or []
    scaled.meter.begin(0, 2, lambda: 1024.0)
    for _ in range(2):
        (1024.0 * scaled.parameter * scaled.gradient(LOCAL) / 2).sum().backward()
        scaled.meter.micro_batch_done()
    assert scaled.parameter.grad is not None
    scaled.parameter.grad /= 1024.0  # as unscale_ does before the step
    other = scaled.meter.finish(0, local_batch_size=LOCAL, whole=True)
    assert other is not None
    assert other.squares == pytest.approx(one.squares, rel=1e-4)
    assert other.total == pytest.approx(one.total, rel=1e-4)


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 4), (2, 2)])
def test_several_losses_of_a_micro_batch_are_measured_as_their_sum(workers: int, micro_batches: int) -> None:
    one, several = ([Worker(100 + rank, workers) for rank in range(workers)] for _ in range(2))
    pairs = [
        (step_of(one, step, micro_batches), step_of(several, step, micro_batches, (3.0, -1.5, -0.5)))
        for step in range(3)
    ]
    assert pairs[0][1] is None, "the meter learns that a loop has several losses"
    for expected, found in pairs[1:]:
        assert expected is not None
        assert found is not None
        for a, b in zip(expected, found, strict=True):
            assert b.to_floats() == pytest.approx(a.to_floats(), rel=1e-4)


def test_a_batch_that_nobody_counts_leaves_nothing_to_the_next() -> None:
    plain, after = Worker(5, 1), Worker(5, 1)
    after.meter.begin(0, 2, lambda: 1.0)
    Worker.backward(after, 1)  # and no finish: no rank took part
    plain.gradient(LOCAL)
    assert step_of([plain], 1, 2) == step_of([after], 1, 2)


def test_parameter_groups_are_told_apart() -> None:
    first, second = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
    meter = NoiseMeter([optimizer], 1)
    meter.begin(0, 2, lambda: 1.0)
    for sign in (1.0, -1.0):
        (first * 2.0 + second * 4.0 * sign).sum().div(2).backward()
        meter.micro_batch_done()
    part = meter.finish(0, local_batch_size=LOCAL, whole=True)
    assert part is not None
    assert part.squares == pytest.approx((2 * 16.0, 2 * 64.0))
    assert part.total == pytest.approx((16.0, 0.0))
    sqr, var = moments_of([part], LOCAL)
    assert sqr == pytest.approx([16.0, -64.0])  # no signal at all: below 0, and only a mean of many is cut at 0
    assert var == pytest.approx([0.0, 128.0])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_parameter_group_may_be_empty(micro_batches: int) -> None:
    """Such as the biases of a model without any."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([{"params": [], "weight_decay": 0.0}, {"params": [weight]}], lr=0.1)
    meter = NoiseMeter([optimizer], 1)
    for step in range(2):
        optimizer.zero_grad()
        meter.begin(step, micro_batches, lambda: 1.0)
        for _ in range(micro_batches):
            (weight * 2.0).sum().div(micro_batches).backward()
            meter.micro_batch_done()
        part = meter.finish(step, local_batch_size=LOCAL, whole=True)
    assert part is not None
    assert part.total == (0.0, 16.0)


def test_adam_sees_the_gradients_divided_by_their_second_moment() -> None:
    """Scaling one parameter's gradients by 1000 changes neither its step nor its noise."""

    def noise_with(factor: float) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.zeros(DIMENSIONS))
        optimizer = torch.optim.Adam([parameter], lr=0.0, eps=1e-12)
        meter = NoiseMeter([optimizer], 1)
        for step in range(20):
            meter.begin(step, 2, lambda: 1.0)
            optimizer.zero_grad()
            for _ in range(2):
                (parameter * factor * (1 + torch.randn(DIMENSIONS))).sum().div(2).backward()
                meter.micro_batch_done()
            part = meter.finish(step, local_batch_size=LOCAL, whole=True)
            optimizer.step()
        assert part is not None
        return moments_of([part], LOCAL)

    small, large = noise_with(1.0), noise_with(1000.0)
    assert large[0] == pytest.approx(small[0], rel=1e-3)
    assert large[1] == pytest.approx(small[1], rel=1e-3)
    assert is_adam(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    assert not is_adam(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_of_every_type_are_measured_alike(kind: Any, micro_batches: int) -> None:
    """A complex gradient counts as its real and imaginary parts do."""

    def measured(dtype: torch.dtype) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        complex_one = dtype.is_complex
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype) if complex_one else torch.zeros(6, dtype=dtype))
        optimizer = kind([parameter], lr=0.1)
        meter = NoiseMeter([optimizer], 1)
        for step in range(3):
            meter.begin(step, micro_batches, lambda: 1.0)
            optimizer.zero_grad()
            for _ in range(micro_batches):
                drawn = torch.randn(3, 2, generator=generator)
                seen = torch.view_as_real(parameter) if complex_one else parameter.reshape(3, 2)
                (seen * drawn).sum().div(micro_batches).backward()
                meter.micro_batch_done()
            part = meter.finish(step, local_batch_size=LOCAL, whole=True)
            optimizer.step()
        assert part is not None
        return part.to_floats()

    expected = measured(torch.float32)
    for dtype in (torch.float64, torch.complex64, torch.complex128):
        assert measured(dtype) == pytest.approx(expected, rel=1e-4)


def test_the_mean_forgets_and_ignores_what_is_not_finite() -> None:
    average = NoiseAverage(batch_size=INITIAL)
    assert average.whole is None
    for _ in range(5000):
        average = average.updated([1.0], [2.0], scale=1.0)
    assert average.whole is not None
    assert (average.whole.sqr, average.whole.var) == pytest.approx((1.0, 2.0))
    assert average.updated([math.nan], [2.0], scale=1.0) == average
    assert average.updated([1.0], [math.inf], scale=1.0) == average
    for _ in range(10_000):
        average = average.updated([3.0], [4.0], scale=1.0)
    assert average.whole is not None
    assert (average.whole.sqr, average.whole.var) == pytest.approx((3.0, 4.0), rel=1e-3)
    assert NoiseAverage.from_state(average.to_state(), INITIAL) == average
    larger = NoiseAverage.from_state(average.to_state(), 2 * INITIAL).whole  # resumed with another batch_size
    before = average.whole
    assert larger is not None
    assert before is not None
    assert (larger.sqr, larger.var) == (before.sqr, before.var / 2)


def test_a_comparison_within_a_step_replaces_those_of_consecutive_steps() -> None:
    paired = NoiseAverage(batch_size=INITIAL).updated([100.0], [100.0], scale=1.0, paired=True)
    better = paired.updated([1.0], [2.0], scale=1.0)
    assert better.whole is not None
    assert (better.whole.sqr, better.whole.var) == pytest.approx((1.0, 2.0))
    assert better.updated([100.0], [100.0], scale=1.0, paired=True) == better


def test_the_mean_tells_its_error_and_one_estimate_none() -> None:
    rng = np.random.default_rng(0)
    first = NoiseAverage(batch_size=INITIAL).updated([1.0], [10.0], scale=1.0)
    assert first.whole is not None
    assert first.whole.sqr_error == pytest.approx(11.0)
    found = []
    for _ in range(200):
        average = NoiseAverage(batch_size=INITIAL)
        for _ in range(30):
            average = average.updated([10 + 20 * rng.normal()], [10.0], scale=1.0)
        noise = average.whole
        assert noise is not None
        found.append((average.sqr[0] / average.weight, noise.sqr_error))
    sqrs, errors = np.array(found).T
    assert np.mean(errors) == pytest.approx(np.std(sqrs), rel=0.2)


def test_the_mean_follows_drift_as_soon_as_its_estimates_tell_it_and_not_sooner() -> None:
    def mean_of(spread: float) -> float:
        rng = np.random.default_rng(1)
        average = NoiseAverage(batch_size=INITIAL)
        for step in range(400):
            true = 1.0 if step < 300 else 0.1
            average = average.updated([true * (1 + spread * rng.normal())], [10.0], scale=1.0)
        assert average.whole is not None
        return average.whole.sqr

    assert mean_of(0.3) == pytest.approx(0.1, rel=0.3)  # 1,000 steps of memory would still say 0.77
    assert mean_of(4.0) > 0.3


def test_a_state_without_errors_is_read() -> None:
    old = NoiseAverage.from_state({"sqr": [2.0], "var": [3.0], "weight": 0.5, "paired": False}, INITIAL)
    assert old.whole is not None
    assert (old.whole.sqr, old.whole.var) == (4.0, 6.0)
    again = old.updated([4.0], [6.0], scale=1.0).updated([4.2], [6.0], scale=1.0)
    assert again.whole is not None
    assert again.whole.sqr == pytest.approx(4.0, rel=0.02)
