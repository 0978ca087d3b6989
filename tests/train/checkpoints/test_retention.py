"""Which checkpoints a run removes."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.train.checkpoints.retention import Entry, to_remove
from offload.train.config import Checkpoints

SCORES = st.one_of(
    st.sampled_from(
        [None, True, "0.5", [], math.nan, math.inf, -math.inf, sys.float_info.max, -sys.float_info.max, 10**400]
    ),
    st.integers(-3, 3),
    st.floats(-2.0, 2.0),
)
METRICS = st.one_of(st.just({}), st.fixed_dictionaries({"loss": SCORES}))
ENTRIES = st.permutations(range(8)).flatmap(
    lambda order: st.lists(METRICS, max_size=8).map(
        lambda metrics: [Entry(name=f"{n}", metrics=m) for n, m in zip(order, metrics, strict=False)]
    )
)
SETTINGS = st.builds(
    Checkpoints, keep=st.integers(1, 5), best=st.sampled_from([None, "loss"]), mode=st.sampled_from(["max", "min"])
)


def measured(entry: Entry) -> float | None:
    value = entry.metrics.get("loss")
    usable = isinstance(value, int | float) and abs(value) < sys.float_info.max
    return value if usable else None


@given(ENTRIES, SETTINGS)
def test_the_newest_stays_and_no_more_than_are_to_be_kept_beside_it(
    entries: list[Entry], settings: Checkpoints
) -> None:
    removed = to_remove(entries, settings)
    kept = [entry for entry in entries if entry.name not in removed]
    assert len(set(removed)) == len(removed)
    assert {entry.name for entry in entries} >= set(removed)
    assert len(kept) in {min(len(entries), settings.keep), min(len(entries), settings.keep + 1)}
    if entries:
        assert max(entry.name for entry in entries) not in removed
    if settings.best is None:
        assert len(kept) == min(len(entries), settings.keep)
        assert removed == sorted(removed)


@given(ENTRIES, SETTINGS)
def test_nothing_better_is_removed_than_what_stays(entries: list[Entry], settings: Checkpoints) -> None:
    removed = to_remove(entries, settings)
    newest = max((entry.name for entry in entries), default="")
    gone = [entry for entry in entries if entry.name in removed]
    stays = [entry for entry in entries if entry.name not in removed and entry.name != newest]
    for bad in gone:
        for good in stays:
            if settings.best is None:
                assert bad.name < good.name
                continue
            worse, better = measured(bad), measured(good)
            if worse == better:
                assert bad.name < good.name, "of equals, the older goes first"
            else:
                assert better is not None, "one without a measurement is the worst"
                assert worse is None or (worse < better if settings.mode == "max" else worse > better)


@given(ENTRIES, SETTINGS, st.data())
def test_a_run_that_removes_after_each_checkpoint_keeps_what_a_look_at_all_keeps(
    entries: list[Entry], settings: Checkpoints, data: Any
) -> None:
    """Except for what was the newest in between, nothing depends on when the run removes."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        kept.append(entry)
        removed = to_remove(kept, settings)
        kept = [each for each in kept if each.name not in removed]
    at_once = to_remove(entries, settings)
    assert [each.name for each in kept] == sorted(each.name for each in entries if each.name not in at_once)
    assert to_remove(kept, settings) == []


@pytest.mark.parametrize(("mode", "kept"), [("max", "237"), ("min", "147")])
def test_the_best_and_the_newest(mode: Any, kept: str) -> None:
    losses = {"1": 0.1, "2": 0.9, "3": 0.5, "4": 0.2, "5": None, "6": math.nan, "7": None}
    entries = [Entry(name=name, metrics={"loss": loss}) for name, loss in losses.items()]
    removed = to_remove(entries, Checkpoints(keep=2, best="loss", mode=mode))
    assert "".join(name for name in losses if name not in removed) == kept
