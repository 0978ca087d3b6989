"""Positions that tell how many samples their unit gave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.unit_ids import TrainedPart, UnitIds

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(COUNTS, st.integers(0, 3_000_000), st.data())
def test_positions_tell_which_part_of_each_unit_was_trained(
    counts: list[int], more_units: int, data: st.DataObject
) -> None:
    ids = UnitIds(len(counts) + more_units)
    positions, expected = [], {}
    for unit, count in enumerate(counts):
        places = (
            np.array(sorted(data.draw(st.sets(st.integers(0, count - 1)))), dtype=np.int64)
            if count
            else np.zeros(0, np.int64)
        )
        positions.append(ids.positions(unit, count, places))
        if len(places):
            expected[unit] = TrainedPart(count, Ranges.of(places))
    everything = np.concatenate(positions)
    assert len(set(everything.tolist())) == len(everything)
    assert ids.trained(Ranges.of(everything)) == expected
    for unit, trained in expected.items():
        assert trained.whole == (len(trained.done) == counts[unit])


@given(st.integers(1, 1 << 24))
def test_ids_and_positions_fit_into_an_int64(units: int) -> None:
    ids = UnitIds(units)
    last = np.array([ids.most - 1], dtype=np.int64)
    assert 0 <= int(ids.positions(units - 1, ids.most, last)[0]) < 1 << 63
    assert 0 <= int(ids.samples(units - 1, last)[0]) < 1 << 63
    assert ids.most >= 1 << 18


@pytest.mark.parametrize(
    "pairs", [((1 << 62, (1 << 62) + 1),), ((5, 6),)], ids=["no such unit", "beyond the unit's count"]
)
def test_positions_of_another_data_set_are_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="of 4 units"):
        UnitIds(4).trained(Ranges(pairs))


def test_two_counts_of_one_unit_are_refused() -> None:
    ids, place = UnitIds(4), np.zeros(1, np.int64)
    both = Ranges.of(np.concatenate([ids.positions(2, 7, place), ids.positions(2, 8, place)]))
    with pytest.raises(ValueError, match="unit 2"):
        ids.trained(both)
