"""The 95 % range of a plan holds the truth in random worlds that a simulated probe measured, in every scenario."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.worlds import SCENARIOS, Scenario, coverage, outcome

WORLDS = 60


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.label)
def test_the_range_holds_the_truth_and_is_no_wider_than_it_must_be(scenario: Scenario) -> None:
    rng = np.random.default_rng(1)
    found = coverage([outcome(scenario, rng) for _ in range(WORLDS)])
    assert found["coverage"] >= 0.86  # 95 %, less three standard deviations of so few worlds
    assert found["half_width_over_oracle"] <= 2.2
