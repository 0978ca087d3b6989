"""Goodput lost because a probe saw few gradients: a simulated probe measures the noise, a plan chooses the batch, the truth judges.

A gradient of b samples is a fixed signal plus normal noise, whose variance is ``noise_scale/b`` times the squared signal. The step takes
a constant and a time per sample, whose ratio is random between 16 and 1,024 samples. The input is infinitely fast.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise, gradient_moments, noise_from_gradients
from offload.model.step_time import StepTime

Floats = NDArray[np.float64]
Spectrum = Literal["equal", "signal strongest", "signal weakest"]

INITIAL, MOST = 64, 65_536
SAMPLES_EACH = 32  # half of the initial batch, as in a probe
MOST_GRADIENTS = 1024 // SAMPLES_EACH  # a probe keeps 1,024 rows
GROUP = 4  # gradients that the rule before compared with each other


@dataclass(frozen=True)
class Scenario:
    """What is probed.

    Args:
        noise_scale: the trace of one sample's covariance over the squared signal, in samples.
        dimension: of the noise.
        gradients: how many the probe compares; with ``more``, at least.
        more: whether it goes on, up to ``MOST_GRADIENTS``, until they tell the noise.
        spectrum: "equal": the noise has the same variance in all directions. Otherwise direction i has 1/i of the first one's, and the
            signal lies in the strongest or the weakest one.
    """

    noise_scale: float
    dimension: int
    gradients: int
    more: bool = False
    spectrum: Spectrum = "equal"

    @property
    def label(self) -> str:
        """The row's name."""
        count = f"{self.gradients}{f' to {MOST_GRADIENTS}' if self.more else ''} gradients"
        spectrum = "" if self.spectrum == "equal" else f", {self.spectrum}"
        return f"noise scale {self.noise_scale:,.0f}, dimension {self.dimension:,}, {count}{spectrum}"


SCENARIOS = (
    *(
        Scenario(scale, dimension, count)
        for scale in (100.0, 1000.0, 10_000.0)
        for dimension in (30, 1000, 100_000)
        for count in (8, 16)
    ),
    *(Scenario(scale, 30, 16, more=True) for scale in (100.0, 1000.0, 10_000.0)),
    *(
        Scenario(1000.0, 30, 16, more, spectrum)
        for spectrum in ("signal strongest", "signal weakest")
        for more in (False, True)
    ),
)


def losses(scenario: Scenario, worlds: int) -> dict[str, float]:
    """The loss of true goodput against an oracle's batch: median, 90 % quantile and worst; the same by the rule before, which compared
    gradients in groups of four and took the estimate for the truth; and the mean number of gradients."""
    rng = np.random.default_rng(0)
    now, before, counts = [], [], []
    for _ in range(worlds):
        step = StepTime(0.001 * math.exp(rng.uniform(math.log(16), math.log(1024))), 0.001)
        truth = GradientNoise(sqr=1.0, var=scenario.noise_scale / INITIAL, batch_size=INITIAL)
        squares, products, groups = _probed(scenario, rng)
        count = scenario.gradients
        while scenario.more and count < MOST_GRADIENTS and not _noise(squares, products, count).told:
            count += 1
        now.append(_loss(step, truth, _noise(squares, products, count)))
        before.append(_loss(step, truth, groups))
        counts.append(count)
    return {
        "median_loss": round(float(np.median(now)), 4),
        "p90_loss": round(float(np.quantile(now, 0.9)), 4),
        "worst_loss": round(max(now), 4),
        "median_loss_before": round(float(np.median(before)), 4),
        "p90_loss_before": round(float(np.quantile(before, 0.9)), 4),
        "mean_gradients": round(float(np.mean(counts)), 1),
    }


def _probed(scenario: Scenario, rng: np.random.Generator) -> tuple[Floats, Floats, GradientNoise]:
    """Squared norms and products with the sum before, of as many gradients as there may be; and the noise by the rule before, from as
    many as the scenario has."""
    count = MOST_GRADIENTS if scenario.more else scenario.gradients
    weights = np.ones(scenario.dimension) if scenario.spectrum == "equal" else 1 / np.arange(1, scenario.dimension + 1)
    variances = scenario.noise_scale / SAMPLES_EACH * weights / weights.sum()
    gradients = rng.normal(size=(count, scenario.dimension)) * np.sqrt(variances)
    gradients[:, -1 if scenario.spectrum == "signal weakest" else 0] += 1.0
    sums = np.cumsum(gradients, axis=0)
    products = np.concatenate([[0.0], np.einsum("ij,ij->i", gradients[1:], sums[:-1])])
    squares = np.einsum("ij,ij->i", gradients, gradients)
    groups = gradients[: scenario.gradients].reshape(-1, GROUP, scenario.dimension)
    of_means = np.sum(groups.mean(axis=1) ** 2, axis=1)
    sqr, var = gradient_moments(
        float(np.mean(squares[: scenario.gradients])), float(np.mean(of_means)), GROUP, SAMPLES_EACH, INITIAL
    )
    return squares, products, GradientNoise(max(sqr, 0.0), max(var, 0.0), INITIAL)


def _noise(squares: Floats, products: Floats, count: int) -> GradientNoise:
    return noise_from_gradients(squares[:count].tolist(), products[:count].tolist(), SAMPLES_EACH, INITIAL)


def _loss(step: StepTime, truth: GradientNoise, found: GradientNoise) -> float:
    """The share of goodput that the batch chosen by ``found`` loses."""
    best, chosen = (_goodput(step, truth, _batch(step, noise)) for noise in (truth, found.cautious))
    return 1 - chosen / best


def _batch(step: StepTime, noise: GradientNoise) -> int:
    # Two workers without synchronisation: a single one would have to accumulate to grow its batch.
    _, local, accum = JointGoodput(step, noise).optimize(1, 2, MOST)
    return int(2 * local * (accum + 1))


def _goodput(step: StepTime, noise: GradientNoise, batch: int) -> float:
    return float(JointGoodput(step, noise).goodput(1, 2, batch // 2, 0))
