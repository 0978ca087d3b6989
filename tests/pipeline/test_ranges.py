"""Sets of positions as ranges, against Python's sets."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.order.ranges import Ranges

ids = st.lists(st.integers(-30, 120), max_size=80) | st.lists(st.integers(-3, 12), max_size=12)  # sparse, or dense


def as_set(ranges: Ranges) -> set[int]:
    return {i for start, stop in ranges.pairs for i in range(start, stop)}


def is_canonical(ranges: Ranges) -> bool:
    flat = [x for pair in ranges.pairs for x in pair]
    return flat == sorted(set(flat))


@settings(deadline=None)
@given(values=ids)
def test_of_any_order_with_repetitions(values: list[int]) -> None:
    for made in (Ranges.of(values), Ranges.of(iter(values)), Ranges.of(np.array(values, dtype=np.int32))):
        assert as_set(made) == set(values)
        assert is_canonical(made)
        assert len(made) == len(set(values))
        assert bool(made) == bool(values)


@settings(deadline=None)
@given(a=ids, b=ids)
def test_union(a: list[int], b: list[int]) -> None:
    both = Ranges.of(a).union(Ranges.of(b))
    assert as_set(both) == set(a) | set(b)
    assert is_canonical(both)
    assert both == Ranges.of(b).union(Ranges.of(a)) == Ranges.of(a + b)
    assert both.union(Ranges.of(a)) == both


@settings(deadline=None)
@given(values=ids, n=st.integers(0, 150))
def test_missing_from(values: list[int], n: int) -> None:
    missing = Ranges.of(values).missing_from(n)
    expected = sorted(set(range(n)) - set(values))
    assert len(missing) == len(expected)
    assert missing[:].dtype == np.int64
    for part in (slice(None), slice(3, 9), slice(0, 0), slice(n, n + 5)):
        assert missing[part].tolist() == expected[part]


@settings(deadline=None)
@given(values=ids, asked=ids)
def test_membership(values: list[int], asked: list[int]) -> None:
    ranges = Ranges.of(values)
    assert ranges.holds(np.array(asked, dtype=np.int64)).tolist() == [i in set(values) for i in asked]
    assert [i in ranges for i in asked] == [i in set(values) for i in asked]
    assert "1" not in ranges


@settings(deadline=None)
@given(values=ids)
def test_a_checkpoint_gives_back_what_it_took(values: list[int]) -> None:
    ranges = Ranges.of(values)
    assert Ranges.from_list(json.loads(json.dumps(ranges.to_list()))) == ranges


@pytest.mark.parametrize(
    "pairs",
    [
        [[5, 9], [1, 3]],  # unsorted
        [[1, 5], [3, 9]],  # overlapping
        [[1, 3], [3, 9]],  # adjacent: one range
        [[2, 2]],  # empty
        [[4, 2]],  # backwards
        [[1, 3], [1, 3]],  # twice
    ],
)
def test_lists_that_no_ranges_wrote_are_refused(pairs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="sorted, disjoint"):
        Ranges.from_list(pairs)


def test_a_trained_epoch_is_one_pair() -> None:
    # Half a million positions trained in pieces of 256, in any order: a checkpoint must not grow with the data set.
    pieces = [Ranges.of(np.arange(i, i + 256)) for i in np.random.default_rng(0).permutation(2000) * 256]
    done = Ranges()
    for piece in pieces:
        done = done.union(piece)
    assert done.pairs == ((0, 512_000),)


def test_they_are_values() -> None:
    assert {Ranges.of([1, 2]), Ranges.of([2, 1])} == {Ranges(((1, 3),))}
    with pytest.raises(AttributeError):
        Ranges().pairs = ()  # type: ignore[misc]
