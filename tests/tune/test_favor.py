"""The best trial's newest run has the larger weight."""

from __future__ import annotations

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


def test_bad_values_are_refused() -> None:
    for bad, message in (
        ({"metric": "", "mode": "max"}, "metric must be text"),
        ({"metric": "accuracy", "mode": "most"}, 'mode must be "max" or "min", found'),
        ({"metric": "accuracy", "mode": "min", "weight": 0}, "weight must be"),
    ):
        with pytest.raises(offload.ConfigError, match=message):
            offload.tune.favor_best(**bad)  # type: ignore[arg-type]
