"""How often checkpoints are committed, and what of memory bounds a batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.adapt.failures import LEAST_INTERVAL_S, MOST_COMMIT_SHARE, commit_interval_s, failures_per_s
from offload.model.batch_split import BatchSplit
from offload.train.checkpoints.plain import to_plain
from offload.train.worker.saving.objects import copied
from offload.train.worker.steps.device_memory import USABLE, largest_local_batch

positive = st.floats(1e-6, 1e4)


@given(cost=positive, rate=st.floats(1e-9, 1.0))
def test_commits_never_take_more_than_a_hundredth_of_the_time(cost: float, rate: float) -> None:
    assert cost / commit_interval_s(cost, rate) <= MOST_COMMIT_SHARE * (1 + 1e-9)
    assert commit_interval_s(cost, rate) >= LEAST_INTERVAL_S


@given(cost=st.floats(0.01, 1.0), rate=st.floats(1e-7, 1e-5))
def test_no_other_interval_loses_less(cost: float, rate: float) -> None:
    best = commit_interval_s(cost, rate)

    def lost(interval: float) -> float:
        return cost / interval + rate * interval / 2

    others = [each for each in (0.8 * best, 1.25 * best) if each >= max(LEAST_INTERVAL_S, cost / MOST_COMMIT_SHARE)]
    assert all(lost(best) <= lost(each) * (1 + 1e-9) for each in others)


def test_the_failure_rate_is_what_was_seen_in_the_long_run() -> None:
    assert failures_per_s(0, 0.0, 1) == pytest.approx(1 / 86400)
    assert failures_per_s(0, 0.0, 10) == pytest.approx(10 / 86400)
    assert failures_per_s(500, 1e6, 4) == pytest.approx(500 / 1e6, rel=0.03)


@pytest.mark.parametrize("every_s", ["often", -1.0, math.nan])
def test_an_interval_that_is_none_is_refused(every_s: object) -> None:
    with pytest.raises(offload.ConfigError, match="every_s must be"):
        offload.Checkpoints(every_s=every_s)  # type: ignore[arg-type]


def test_the_largest_local_batch_is_what_memory_is_left_for() -> None:
    found = largest_local_batch(32, peak=2e9 + 32 * 5e7, resident=2e9, total=16e9)
    assert found == math.floor((USABLE * 16e9 - 2e9) / 5e7)
    assert largest_local_batch(32, peak=3e9, resident=3e9, total=16e9) == 32  # nothing was seen of a batch's part
    assert largest_local_batch(8, peak=20e9, resident=15e9, total=16e9) == 1


@given(local=st.integers(1, 500), accum=st.integers(0, 7), workers=st.integers(1, 8), most=st.integers(1, 500))
def test_a_batch_that_did_not_fit_is_accumulated_instead(local: int, accum: int, workers: int, most: int) -> None:
    before = BatchSplit(local_batch_size=local, accum_steps=accum, workers=workers)
    after = before.with_local_at_most(most)
    assert after.local_batch_size <= max(most, 0) or after == before
    assert (
        before.global_batch_size
        <= after.global_batch_size
        < before.global_batch_size + workers * (after.accum_steps + 1)
    )


@given(
    initial=st.integers(1, 512),
    growth=st.integers(1, 8),
    before=st.builds(
        BatchSplit, local_batch_size=st.integers(1, 300), accum_steps=st.integers(0, 4), workers=st.integers(1, 8)
    ),
    workers=st.integers(1, 8),
    most=st.integers(1, 512),
)
def test_an_adapted_batch_outlives_a_restart_within_the_sizes_of_the_script(
    initial: int, growth: int, before: BatchSplit, workers: int, most: int
) -> None:
    """The number of workers may have changed, and the sizes, too."""
    sizes = offload.BatchSize(initial=initial, max=initial * growth, local=(1, most))
    adapted = sizes.carried_over(before, workers)
    asked = min(max(before.global_batch_size, initial), initial * growth)
    assert adapted.workers == workers
    assert adapted.local_batch_size <= most
    if growth == 1:
        assert adapted == sizes.split(workers)
    elif workers == before.workers and asked == before.global_batch_size and before.local_batch_size <= most:
        assert adapted == before
    else:
        micro_batches = before.accum_steps + adapted.accum_steps + 2  # each may round up
        assert asked <= adapted.global_batch_size < asked + workers * micro_batches


def test_a_copied_state_does_not_change_with_training() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()], "sizes": (1, 2)}
    kept = to_plain(state, "the state", copied)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1.0
    assert torch.equal(kept["model"]["weight"], before)
    assert kept["sizes"] == (1, 2)
