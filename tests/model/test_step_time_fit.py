"""Few noisy measurements, predictions that hold where something was seen, and an honest width where nothing was."""

from __future__ import annotations

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.model import StepTime, fit_step_time
from tests.synthetic import Truth, measure, truths


def test_four_noisy_points_predict_within_ten_percent_where_they_were_taken() -> None:
    errors = []
    for truth in truths(60):
        seen = truth.points(4)
        fit = fit_step_time(*seen.configurations, *measure(truth.model, seen, noise=0.05, rng=truth.rng))
        held_out = truth.points_between(seen, 20)
        expected = truth.model.predict(*held_out.configurations, held_out.accum)
        errors.append(np.abs(fit.step_time.predict(*held_out.configurations, held_out.accum) / expected - 1))
    assert np.median(np.concatenate(errors)) <= 0.10


def test_the_stated_range_holds_the_truth() -> None:
    inside = []
    for truth in truths(60):
        seen = truth.points(8)
        fit = fit_step_time(*seen.configurations, *measure(truth.model, seen, noise=0.05, rng=truth.rng))
        held_out = truth.points_between(seen, 20)
        at = (*held_out.configurations, held_out.accum)
        off = np.abs(np.log(fit.step_time.predict(*at) / truth.model.predict(*at)))
        inside.append(off <= np.log1p(fit.uncertainty(*at)))
    assert np.mean(np.concatenate(inside)) >= 0.9


@pytest.mark.parametrize("noise", [0.05, 0.1])
@pytest.mark.parametrize("each", [1, 3])
def test_the_range_of_one_worker_holds_the_truth(noise: float, each: int) -> None:
    """A probe of one worker measures its steps once: without and with synchronisation are the same number."""
    rng = np.random.default_rng(0)
    sizes = np.repeat([8.0, 16.0, 32.0, 64.0], each)
    inside = []
    for _ in range(100):
        truth = StepTime(rng.uniform(0.005, 0.05), rng.uniform(0.0005, 0.005))
        seconds = np.asarray(truth.compute_time_s(sizes)) * np.exp(rng.normal(0, noise, sizes.size))
        ones = np.ones_like(sizes)
        fit = fit_step_time(ones, ones, sizes, seconds, seconds)
        off = abs(np.log(fit.step_time.predict(1, 1, 64) / truth.predict(1, 1, 64)))
        inside.append(off <= np.log1p(fit.uncertainty(1, 1, 64)))
    assert np.mean(inside) >= 0.92


def test_a_fast_outlier_widens_the_range_as_a_slow_one_does() -> None:
    sizes = np.array([8.0, 8.0, 16.0, 16.0, 32.0, 32.0, 64.0, 64.0])
    truth, ones = StepTime(0.02, 0.001), np.ones(8)
    widths = []
    for factor in (0.6, 1 / 0.6):
        seconds = np.asarray(truth.compute_time_s(sizes))
        seconds[3] *= factor
        widths.append(fit_step_time(ones, ones, sizes, seconds, seconds).uncertainty(1, 1, 64))
    assert widths[0] == pytest.approx(widths[1], rel=0.5)


def test_without_noise_the_truth_is_found() -> None:
    model = StepTime(0.02, 0.001, 0.01, 0.002, 0.05, 0.004, gamma=2.5)
    nodes = np.array([1, 1, 1, 1, 1, 2, 2, 4, 4])
    workers = np.array([1, 1, 2, 4, 8, 2, 8, 16, 32])
    local = np.array([8, 64, 32, 32, 64, 16, 64, 16, 128])
    last = model.predict(nodes, workers, local)
    fit = fit_step_time(nodes, workers, local, model.compute_time_s(local), last)
    np.testing.assert_allclose(fit.step_time.predict(nodes, workers, local), last, rtol=0.02)
    assert fit.residual < 0.01


def test_what_was_never_seen_is_hoped_for_and_said_to_be_unknown() -> None:
    model = StepTime(0.02, 0.001, 0.01, 0.002, 0.05, 0.004, gamma=2.0)
    nodes, workers, local = np.array([1, 1, 1, 1]), np.array([1, 2, 4, 4]), np.array([16, 32, 32, 64])
    fit = fit_step_time(nodes, workers, local, model.compute_time_s(local), model.predict(nodes, workers, local))
    # Several nodes: assumed hardly slower than one, and known to be unknown.
    assert fit.step_time.predict(2, 4, 32) >= fit.step_time.predict(1, 4, 32)
    assert fit.step_time.predict(2, 4, 32) <= 1.3 * fit.step_time.predict(1, 4, 32)
    assert fit.uncertainty(2, 4, 32) > 2 * fit.uncertainty(1, 4, 32)
    assert np.asarray(fit.uncertainty(np.array([1, 2]), np.array([2, 2]), 32)).shape == (2,)


def test_one_batch_size_tells_nothing_of_others() -> None:
    fit = fit_step_time([1, 1], [1, 1], [32, 32], [0.1, 0.1], [0.1, 0.1])
    assert fit.step_time.predict(1, 1, 32) == pytest.approx(0.1, rel=0.01)
    assert fit.uncertainty(1, 1, 128) > 5 * fit.uncertainty(1, 1, 32)
    assert 0.1 < fit.step_time.predict(1, 1, 128) < 0.4


def test_an_outlier_is_damped() -> None:
    model = StepTime(0.02, 0.001)
    local = np.array([16, 32, 64, 96, 128, 160, 192, 256])
    times = np.asarray(model.compute_time_s(local)).copy()
    times[3] *= 5  # a step in which something else ran
    ones = np.ones(len(local))
    fit = fit_step_time(ones, ones, local, times, times)
    assert fit.step_time.predict(1, 1, 128) == pytest.approx(model.predict(1, 1, 128), rel=0.1)


def test_a_single_measurement_is_enough_to_begin() -> None:
    fit = fit_step_time(1, 1, 64, 0.2, 0.2)
    assert fit.step_time.predict(1, 1, 64, 3) == pytest.approx(0.8, rel=0.01)
    assert fit.best_case.predict(1, 1, [32, 64]) == pytest.approx([0.1, 0.2], rel=0.01)
    known = fit_step_time([1, 1], [1, 1], [32, 64], [0.15, 0.2], [0.15, 0.2])
    assert known.best_case == known.step_time


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (([1], [1, 2], [8, 8], [0.1, 0.1], [0.1, 0.1]), "arrays of one length"),
        (([], [], [], [], []), "at least one entry each"),
        (
            ([1, 1], [1, 1], [8, 8], [0.1, -0.1], [0.1, 0.1]),
            r"compute_time_s must be positive and finite, found -0.1 in entry 1",
        ),
        (([1], [1], [8], [0.1], [float("nan")]), "last_micro_batch_time_s must be positive and finite, found nan"),
        (([2], [1], [8], [0.1], [0.1]), "a node without a worker: entry 0 has 2 nodes, 1 workers"),
    ],
)
def test_measurements_that_cannot_be_are_named(arrays: tuple[object, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_step_time(*arrays)  # type: ignore[arg-type]


def test_truths_differ() -> None:
    first, second = truths(2)
    assert isinstance(first, Truth)
    assert first.model != second.model
