"""The best trial's newest run has the larger weight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.tune.favor import weights

TRIALS = [f"build_3f_0000{number}" for number in range(4)]


@given(
    st.dictionaries(st.sampled_from(TRIALS), st.floats(0, 1), min_size=1),
    st.dictionaries(st.sampled_from(TRIALS), st.integers(1, 12)),
)
def test_the_best_trial_alone_has_the_weight_whichever_run_it_has(
    scores: dict[str, float], numbers: dict[str, int]
) -> None:
    runs = {trial: trial if number == 1 else f"{trial}-{number}" for trial, number in numbers.items()}
    of_runs = weights(scores, [*runs.values(), "somebody-2", "else"], 4.0)
    assert set(of_runs) == {runs[trial] for trial in runs if trial in scores}
    favored = [trial for trial, run in runs.items() if of_runs.get(run) == 4.0]
    assert len(favored) <= 1
    for trial in favored:
        assert scores[trial] == max(scores.values())
    best = [trial for trial, score in scores.items() if score == max(scores.values())]
    assert favored or not set(best) <= set(runs)


def test_a_trial_that_diverged_is_not_favored() -> None:
    for diverged in (math.nan, math.inf, -math.inf):
        scores = {TRIALS[0]: diverged, TRIALS[1]: 0.5, TRIALS[2]: 0.9}
        assert weights(scores, scores, 4.0) == {TRIALS[0]: 1.0, TRIALS[1]: 1.0, TRIALS[2]: 4.0}
    assert weights({TRIALS[0]: math.nan}, TRIALS, 4.0) == {TRIALS[0]: 1.0}


def test_an_arbiter_that_does_not_answer_ends_no_search(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent() -> None:
        raise offload.ConfigError("the arbiter has not answered within 30 s")

    monkeypatch.setattr("offload.arbiter.registry.status", silent)
    callback = offload.tune.favor_best("score", mode="max")
    callback.on_trial_result(1, [], TRIALS[0], {"score": 1.0})
    assert "not favored until the next result: the arbiter has not answered" in caplog.text


def test_bad_values_are_refused() -> None:
    for bad, message in (
        ({"metric": "", "mode": "max"}, "metric must be text"),
        ({"metric": "accuracy", "mode": "most"}, 'mode must be "max" or "min", found'),
        ({"metric": "accuracy", "mode": "min", "weight": 0}, "weight must be"),
    ):
        with pytest.raises(offload.ConfigError, match=message):
            offload.tune.favor_best(**bad)  # type: ignore[arg-type]
