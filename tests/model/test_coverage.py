"""The 95 % range of a plan holds the truth in random worlds that a simulated probe measured, in every scenario."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.worlds import SCENARIOS, Scenario, coverage, outcome

WORLDS = 60
MOST_DIFFERENT = {
    "samples vary by 3",
    "4 × the probed local batch",
    "2 workers probed, 4 planned, steps vary by 20 %",
    "1 worker probed, 4 nodes planned",
}


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=[] if each.label in MOST_DIFFERENT else [pytest.mark.soak]) for each in SCENARIOS],
    ids=lambda scenario: scenario.label,
)
def test_the_range_holds_the_truth_and_is_no_wider_than_it_must_be(scenario: Scenario) -> None:
    rng = np.random.default_rng(1)
    found = coverage([outcome(scenario, rng) for _ in range(WORLDS)])
    assert found["coverage"] >= 0.86  # 95 %, less three standard deviations of so few worlds
    assert found["half_width_over_oracle"] <= 2.2
