"""The gradient noise that a probe measures: its estimate, its error, and how much batch it supports."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.noise_worlds import Scenario, losses
from offload.errors import ConfigError
from offload.model import Catalog, GradientNoise, InputRate, NodeType, Profile, StepTime, plan
from offload.model.noise import noise_from_gradients
from offload.model.planning.plans import Plan
from tests.strategies import noises, step_times

Floats = NDArray[np.float64]
BOX = Catalog({"box": NodeType(name="box", vcpus=64, memory_gib=64, gpus=1, network_gbps=10, usd_per_hour=1.0)})
STEP = StepTime(0.1, 0.001)
INPUT = InputRate(core_seconds_per_sample=1e-7, wire_bytes_per_sample=1.0)


def measured(gradients: Floats, samples_each: int = 16, batch_size: int = 64) -> GradientNoise:
    """The noise from gradients, a row each."""
    before = np.vstack([np.zeros(gradients.shape[1]), np.cumsum(gradients, axis=0)[:-1]])
    products = np.sum(gradients * before, axis=1)
    return noise_from_gradients(np.sum(gradients**2, axis=1).tolist(), products.tolist(), samples_each, batch_size)


def drawn(count: int, signal: float, noise: float, rng: np.random.Generator, dimension: int = 100) -> Floats:
    """Gradients of so much squared signal and so much variance."""
    mean = np.full(dimension, math.sqrt(signal / dimension))
    return np.asarray(mean + rng.normal(0, math.sqrt(noise / dimension), size=(count, dimension)))


def planned(noise: GradientNoise, step: StepTime = STEP, samples: int | None = None) -> Plan:
    """The plan with batches up to 65,536 on one GPU."""
    profile = Profile(input=INPUT, step_time=step, noise=noise, noise_samples=samples)
    return plan(profile, BOX, gpu_types=["box"], max_batch_size=65_536)


def test_noise_is_estimated_without_bias() -> None:
    # Gradients of 16 samples each: mean of norm 2, and a variance of 5 per gradient.
    rng = np.random.default_rng(0)
    estimates = [measured(drawn(4, 4.0, 5.0, rng)) for _ in range(400)]
    assert np.mean([e.sqr for e in estimates]) == pytest.approx(4.0, rel=0.03)
    assert np.mean([e.var for e in estimates]) == pytest.approx(5 * 16 / 64, rel=0.03)
    for count in (0, 1):
        with pytest.raises(ConfigError, match="at least two gradients"):
            noise_from_gradients([1.0] * count, [0.0] * count, samples_each=16, batch_size=64)


@pytest.mark.parametrize(
    ("signal", "noise", "dimension"), [(1.0, 5.0, 30), (1.0, 30.0, 30), (1.0, 30.0, 1000), (4.0, 5.0, 300)]
)
@pytest.mark.parametrize("count", [8, 16, 64])
def test_the_error_is_the_spread_of_the_estimates(count: int, signal: float, noise: float, dimension: int) -> None:
    rng = np.random.default_rng(count)
    found = []
    for _ in range(300):
        gradients = drawn(count, signal, noise, rng, dimension)
        # The estimate before it is cut at 0.
        sqr = (count * np.sum(np.mean(gradients, axis=0) ** 2) - np.mean(np.sum(gradients**2, axis=1))) / (count - 1)
        found.append((sqr, measured(gradients).sqr_error))
    sqrs, errors = np.array(found).T
    assert math.sqrt(np.mean(errors**2)) == pytest.approx(np.std(sqrs), rel=0.25)


def test_gradients_without_noise_leave_no_error_and_two_leave_a_large_one() -> None:
    assert measured(np.ones((8, 4))).sqr_error == 0
    two = measured(drawn(2, 1.0, 30.0, np.random.default_rng(0)))
    assert two.sqr_error >= 20
    assert not two.told


@given(noises, step_times, st.floats(0, 100), st.floats(1, 10))
def test_more_uncertain_noise_never_chooses_a_larger_batch(
    noise: GradientNoise, step: StepTime, error: float, more: float
) -> None:
    unsure, more_unsure = (dataclasses.replace(noise, sqr_error=error * noise.sqr * by) for by in (1.0, more))
    batches = [planned(each, step).best.batch_size for each in (noise, unsure, more_unsure)]
    assert batches == sorted(batches, reverse=True)


@given(noises, st.floats(1, 1e4), st.floats(0, 100))
def test_the_cautious_noise_bounds_efficiency_and_leaves_exact_noise_as_it_is(
    noise: GradientNoise, scale: float, error: float
) -> None:
    unsure = dataclasses.replace(noise, sqr_error=error)
    batch = noise.batch_size * scale
    assert unsure.cautious.efficiency(batch) <= noise.efficiency(batch) * (1 + 1e-12)
    assert noise.cautious == noise


def test_a_signal_hidden_in_noise_does_not_make_any_batch_free_and_the_plan_says_so() -> None:
    hidden = GradientNoise(sqr=0.0, var=10.0, batch_size=64, sqr_error=1.0)
    made = planned(hidden, samples=512)
    assert made.best.batch_size < 1000
    (said,) = (w for w in made.warnings if "gradient noise" in w)
    assert (
        "measures the gradient noise poorly (|G|² not even from 0), so the plan enlarges the batch cautiously" in said
    )
    assert "At least 512 more than its 512 samples would tell." in said
    (said,) = (w for w in planned(dataclasses.replace(hidden, sqr=1.0)).warnings if "gradient noise" in w)
    assert "|G|² by ± 100%" in said
    assert "more than its" not in said


def test_a_plan_says_nothing_of_noise_that_is_told_and_warns_of_an_old_profile_that_hides_it() -> None:
    told = GradientNoise(sqr=1.0, var=10.0, batch_size=64, sqr_error=0.4)
    assert not any("noise" in warning for warning in planned(told).warnings)
    old = GradientNoise(sqr=0.0, var=10.0, batch_size=64)
    assert any("so any batch looks free: probe again" in warning for warning in planned(old).warnings)


def test_the_missing_samples_are_those_that_bring_the_error_to_half_of_the_signal() -> None:
    noise = GradientNoise(sqr=2.0, var=10.0, batch_size=64, sqr_error=1.5)
    assert noise.samples_missing(512) == 256
    assert dataclasses.replace(noise, sqr_error=1.0).samples_missing(512) == 0


@pytest.mark.parametrize("gradients", [8, 16])
def test_few_gradients_lose_little_goodput(gradients: int) -> None:
    """At a noise scale of 1,000 samples in 30 dimensions: the goals of the recorded table."""
    found = losses(Scenario(1000.0, 30, gradients), worlds=150)
    assert found["median_loss"] <= 0.03
    assert found["p90_loss"] <= 0.10
