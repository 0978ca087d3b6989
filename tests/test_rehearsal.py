"""Random schedules of kills, drains and resizes, in threads: every sample of every pass once, and no hang."""

from __future__ import annotations

from collections import Counter

import pytest

from offload.testing.rehearsal import Rehearsal


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(30))
def test_a_random_schedule_loses_and_repeats_nothing(seed: int) -> None:
    outcome = Rehearsal(seed).go()
    assert not outcome.hung
    assert outcome.passes == {number: Counter(range(240)) for number in range(3)}
    assert (outcome.lost, outcome.repeated) == (0, 0)
