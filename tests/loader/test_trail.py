"""Equal checksums mean that a sampler gave the same batches."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.loader.state.trail import Trail

INDICES = st.integers(-5, 2**70) | st.text(max_size=3) | st.tuples(st.integers(0, 9), st.text(max_size=3))
BATCHES = st.lists(st.lists(INDICES, max_size=4), max_size=8)


def trail_of(batches: list[Any], got: int = 0) -> Trail:
    trail = Trail()
    for batch in batches:
        trail.add(batch, got)
    return trail


@given(BATCHES, BATCHES)
def test_a_checksum_tells_the_batches_apart(one: list[Any], other: list[Any]) -> None:
    same = trail_of(one).after(len(one)) == trail_of(other).after(len(other))
    assert same == (one == other)


@given(BATCHES, st.data())
def test_a_trail_goes_on_from_any_of_its_checksums(batches: list[Any], data: Any) -> None:
    whole = trail_of(batches)
    cut = data.draw(st.integers(0, len(batches)))
    rest = Trail(cut, whole.after(cut))
    for batch in batches[cut:]:
        rest.add(batch, cut)
    assert rest.after(len(batches)) == whole.after(len(batches))


def test_it_forgets_what_the_program_has_got() -> None:
    trail = trail_of([[i] for i in range(100)], got=98)
    assert [trail.after(i) is None for i in (0, 97, 98, 99, 100)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "indices",
    [
        (3, 1),
        range(3, 0, -2),
        np.array([3, 1], np.int32),
        [np.int64(3), np.int16(1)],
        torch.tensor([3, 1]),
        array("q", [3, 1]),
        deque([3, 1]),
    ],
    ids=str,
)
def test_indices_of_any_kind_have_a_checksum(indices: Any) -> None:
    checksum = trail_of([indices]).after(1)
    assert checksum is not None
    assert checksum == trail_of([copy.deepcopy(indices)]).after(1)
    assert checksum != trail_of([[1, 3]]).after(1)


def test_indices_that_are_objects_have_no_checksum() -> None:
    trail = trail_of([[1], [object()], [2]])
    assert trail.after(1) is not None
    assert (trail.after(2), trail.after(3)) == (None, None)
