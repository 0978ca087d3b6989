"""Divide the ranks and the cores of a run among its feeds. Pure.

A feed serves ranks that follow one another, and so whole hosts where it can. It gets the cores of its ranks' own nodes first: their blocks
travel over no link. All in all, it has its ranks' share of the cores, since ranks train in step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from offload.model.feeds import ONE_FEED, FeedRule
from offload.pipeline.feed.datasets import Cores
from offload.pipeline.order.parts import WHOLE, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedTerms:
    """What a hub knows of its run's feeds when it starts.

    Args:
        rule: how many there are.
        homes: the node of each rank of the first worker group, as planned; empty if unknown.
        threads: the calls that each feed beside the hub answers at a time.
    """

    rule: FeedRule = ONE_FEED
    homes: tuple[str, ...] = ()
    threads: int = 64


def parts_of(feeds: int, ranks: int) -> tuple[Part, ...]:
    """The ranks of each feed, as equally many as can be."""
    if feeds == 1:
        return (WHOLE,)
    edges = [ranks * feed // feeds for feed in range(feeds + 1)]
    return tuple(Part(start, stop, ranks) for start, stop in pairwise(edges))


def divided(cores: Cores, parts: Sequence[Part], homes: Sequence[str] = ()) -> tuple[Cores, ...]:
    """The cores of each part, and its share of the object stores. ``homes``: the node of each rank, as far as known.

    A part has a core at least, unless there are fewer cores than parts.
    """
    if len(parts) == 1:
        return (cores,)
    needs = proportional(cores.cores, [part.ranks for part in parts])
    given = [Counter[str]() for _ in parts]
    rest = dict(cores.by_node)
    for node, count in cores.by_node.items():
        here = [homes[part.start : part.stop].count(node) for part in parts]
        if any(here):
            for at, share in enumerate(proportional(count, here)):
                _give(given[at], rest, node, min(share, needs[at] - given[at].total()))
    for node in cores.by_node:
        # All that is needed is left somewhere, so no share is more than its part needs.
        left = [need - own.total() for need, own in zip(needs, given, strict=True)]
        for at, share in enumerate(proportional(rest[node], left)):
            _give(given[at], rest, node, share)
    return tuple(_share(cores, own, part) for own, part in zip(given, parts, strict=True))


def _give(own: Counter[str], rest: dict[str, int], node: str, count: int) -> None:
    own[node] += count
    rest[node] -= count


def _share(cores: Cores, own: Counter[str], part: Part) -> Cores:
    """These cores, with the share of each node's object store that its blocks may fill."""
    shares = {node: own[node] / count for node, count in cores.by_node.items()}
    usual = part.ranks / part.of  # of a node without cores, whose store is a part of the cluster's
    stores = {node: size * shares.get(node, usual) for node, size in cores.stores.items()}
    return dataclasses.replace(cores, nodes=tuple(own.elements()), stores=stores)


def proportional(count: int, weights: Sequence[int]) -> list[int]:
    """Integers in proportion to the weights, whose sum is ``count``: the largest remainders are rounded up, the first of equal ones first.
    All are 0 if all weights are."""
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    shares = [count * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda at: -(count * weights[at] % total))
    for at in by_remainder[: count - sum(shares)]:
        shares[at] += 1
    return shares
