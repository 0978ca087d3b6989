"""Which cores each feed of a run has."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.feed.datasets import Cores
from offload.train.hub.division import divided, parts_of, proportional

NODES = "abcdef"
counts = st.dictionaries(st.sampled_from(NODES), st.integers(1, 40), max_size=6)


def cores_of(by_node: dict[str, int], stores: dict[str, float] | None = None) -> Cores:
    return Cores(nodes=tuple(Counter(by_node).elements()), task_cpus=1.0, stores=stores or {})


@settings(deadline=None)
@given(
    by_node=counts, ranks=st.integers(1, 20), homes=st.lists(st.sampled_from(NODES + "xy"), max_size=20), data=st.data()
)
def test_every_core_has_one_feed_in_proportion_to_the_ranks(
    by_node: dict[str, int], ranks: int, homes: list[str], data: st.DataObject
) -> None:
    feeds = data.draw(st.integers(1, ranks))
    parts = parts_of(feeds, ranks)
    stores = dict.fromkeys(NODES, 100.0)
    shares = divided(cores_of(by_node, stores), parts, sorted(homes)[:ranks])
    assert sum((share.by_node for share in shares), Counter[str]()) == Counter(by_node)
    total = sum(by_node.values())
    for share, part in zip(shares, parts, strict=True):
        assert abs(share.cores - total * part.ranks / part.of) < 1
        assert share.cores > 0 or total < feeds
    for node in NODES:
        assert sum(share.stores[node] for share in shares) == pytest.approx(100.0)


def test_ranks_get_the_cores_of_their_own_nodes() -> None:
    homes = ["a", "a", "b", "b"]
    first, second = divided(cores_of({"a": 8, "b": 8, "c": 16}), parts_of(2, 4), homes)
    assert first.by_node == {"a": 8, "c": 8}
    assert second.by_node == {"b": 8, "c": 8}


def test_a_host_with_more_cores_than_its_ranks_share_gives_the_rest_away() -> None:
    first, second = divided(cores_of({"a": 30, "b": 2}), parts_of(2, 2), ["a", "b"])
    assert first.by_node == {"a": 16}
    assert second.by_node == {"a": 14, "b": 2}


def test_a_feed_has_the_share_of_a_store_that_it_has_of_the_nodes_cores() -> None:
    stores = {"a": 800.0, "c": 400.0, "idle": 100.0}
    first, second = divided(cores_of({"a": 8, "c": 4}, stores), parts_of(2, 2), ["a", "c"])
    assert first.by_node == {"a": 6}
    assert first.stores == {"a": 600.0, "c": 0.0, "idle": 50.0}
    assert second.stores == {"a": 200.0, "c": 400.0, "idle": 50.0}


@given(count=st.integers(0, 500), weights=st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_integers_in_proportion(count: int, weights: list[int]) -> None:
    shares = proportional(count, weights)
    total = sum(weights)
    assert sum(shares) == (count if total else 0)
    assert all(abs(share - count * weight / total) < 1 for share, weight in zip(shares, weights, strict=True) if total)
