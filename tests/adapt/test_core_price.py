"""The number of cores that costs the least: laws over random rates, variations and prices."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.adapt.cores import LOST, CoreCosts, CorePrice

needs = st.floats(0.2, 2000)
overlaps = st.floats(1, 64)
spreads = st.floats(0, 0.3)
prices = st.builds(CorePrice, core=st.floats(0.01, 1), rest=st.floats(0.1, 100), free=st.integers(0, 64))


@given(needed=needs, overlap=overlaps, spread=spreads, price=prices)
def test_no_other_number_of_cores_costs_less(needed: float, overlap: float, spread: float, price: CorePrice) -> None:
    costs = CoreCosts(overlap=overlap, spread=spread, price=price)
    best = costs.best(needed)
    least = costs.per_sample(best, needed) * (1 - 1e-9)
    assert all(costs.per_sample(other, needed) >= least for other in {1, best - 1, best + 1, 2 * best} - {0})


@given(needed=needs, overlap=overlaps, spread=spreads)
def test_without_prices_waiting_costs_little_and_the_cores_keep_up(
    needed: float, overlap: float, spread: float
) -> None:
    costs = CoreCosts(overlap=overlap, spread=spread)
    best = costs.best(needed)
    assert best >= needed - 1e-6
    assert costs.per_sample(best, needed) <= 1 / (1 - LOST) + 1e-6


@given(needed=st.floats(10, 500), spread=st.floats(0.05, 0.3))
def test_the_dearer_the_accelerators_the_more_spare_cores_and_without_noise_none(needed: float, spread: float) -> None:
    def best(rest: float, spread: float) -> int:
        return CoreCosts(overlap=64, spread=spread, price=CorePrice(core=0.04, rest=rest)).best(needed)

    assert best(100.0, spread) >= best(10.0, spread) >= best(1.0, spread)
    assert best(0.04 * needed, 0.0) <= math.ceil(needed) + 1


@pytest.mark.parametrize("share", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("spread", [0.03, 0.15])
def test_the_cores_are_those_of_the_newsvendor(share: float, spread: float) -> None:
    """Rates vary normally in the logarithm: a simulation of the mean of the slower side finds about the same number."""
    rng, needed = random.Random(0), 200.0
    price = CorePrice(core=0.04, rest=0.04 * needed * share)
    varies = [math.exp(rng.gauss(0, spread)) for _ in range(4000)]

    def simulated(cores: float) -> float:
        return (price.rest + price.core * cores) / statistics.fmean(min(cores / needed * each, 1.0) for each in varies)

    ours = CoreCosts(overlap=64, spread=spread, price=price).best(needed)
    least = min(simulated(cores) for cores in range(100, 400, 2))
    assert simulated(ours) <= 1.01 * least
