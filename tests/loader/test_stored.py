"""A change of a data set's attributes is found, whichever it is, and its name is told once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from offload.loader.attribute_watch import StoredWatch


class Images(torch_data.Dataset[Any]):
    def __init__(self, inner: Any = None) -> None:
        self.calls, self.names, self.cache = 0, ["a", "b"], {}
        self.seen: set[int] = set()
        self.recent: deque[int] = deque(maxlen=8)
        self.values = torch.zeros(3)
        self.inner = inner

    def __len__(self) -> int:
        return 2


def new(images: Any) -> None:
    images.file = object()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "calls": lambda images: setattr(images, "calls", images.calls + 1),
    "names": lambda images: images.names.append("c"),
    "cache": lambda images: images.cache.setdefault(len(images.cache), 1),
    "seen": lambda images: images.seen.add(len(images.seen)),
    "recent": lambda images: images.recent.append(1),
    "values": lambda images: setattr(images, "values", torch.zeros(3)),
    "file": new,
}
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda images: images,
    "a subset of a subset": lambda images: torch_data.Subset(torch_data.Subset(images, [0, 1]), [1]),
    "several": lambda images: torch_data.ConcatDataset([Images(), images]),
    "a data set of the user": Images,
}


@given(st.sampled_from(sorted(CHANGES)), st.sampled_from(sorted(WRAPPED)), st.integers(0, 2))
def test_the_first_change_is_told(change: str, wrapped: str, looks_before: int) -> None:
    images, stored = Images(), StoredWatch()
    dataset = WRAPPED[wrapped](images)
    for _ in range(looks_before):
        assert not stored.since(stored.look(dataset))
    before = stored.look(dataset)
    CHANGES[change](images)
    assert stored.since(before) == f"Images.{change}"
    before = stored.look(dataset)
    CHANGES["calls"](images)
    assert not stored.since(before)


def test_a_reading_method_stores_nothing() -> None:
    images, stored = Images(), StoredWatch()
    before = stored.look(images)
    assert (images.names[0], images.cache.get(1), len(images.seen), float(images.values[0])) == ("a", None, 0, 0.0)
    assert not stored.since(before)


class Slotted:
    __slots__ = ("calls",)


@pytest.mark.parametrize(
    "dataset", [[1, 2], range(3), torch.zeros(3), Slotted(), "text"], ids=lambda each: type(each).__name__
)
def test_anything_may_be_a_data_set(dataset: Any) -> None:
    stored = StoredWatch()
    assert not stored.since(stored.look(dataset))


def test_it_looks_at_few_data_sets_and_not_into_long_lists() -> None:
    images = Images()
    images.names = ["name"] * 100_000
    many = torch_data.ConcatDataset([images, *(Images() for _ in range(1000))])
    assert len(StoredWatch().look(many)) <= 16
