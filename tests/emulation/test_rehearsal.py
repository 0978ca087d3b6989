"""Random schedules of kills, drains, stops and resizes, in threads: every sample of every pass once, and no hang."""

from __future__ import annotations

from collections import Counter

import pytest

from offload.train.worker.data import batches
from tests.emulation.rehearsal import Rehearsal


@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(30, 330))])
def test_a_random_schedule_loses_and_repeats_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # ranks that are to end wait for no sample at all
        monkeypatch.setattr(batches, "BREAK_OFF_S", -1.0)
    outcome = Rehearsal(seed).go()
    assert not outcome.hung
    assert outcome.passes == {number: Counter(range(240)) for number in range(3)}
    assert (outcome.lost, outcome.repeated) == (0, 0)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(10, 110))])
def test_several_feeds_lose_and_repeat_nothing(seed: int) -> None:
    outcome = Rehearsal(seed, feeds=2 + seed % 2).go()
    assert not outcome.hung
    assert outcome.passes == {number: Counter(range(240)) for number in range(3)}
    assert (outcome.lost, outcome.repeated) == (0, 0)
