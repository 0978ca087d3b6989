"""What other programs hold of a cluster: amounts that stay for a while, since tasks come and go. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

SETTLED_S = 5.0  # tasks come and go, and Ray reports free resources later than held ones
DIGITS = 4  # decimals of resource amounts: Ray's resolution

Amounts = Mapping[str, Mapping[str, float]]
"""Amounts of resources by the names of node and resource."""


class Others:
    """What other programs hold.

    Args:
        held: what they held at the start.
        certain: whether all that a run itself holds is known, so that the rest is others'.
        settled_s: how long an amount must stay the same before it counts.
    """

    def __init__(self, held: Amounts, *, certain: bool = True, settled_s: float = SETTLED_S) -> None:
        self.held, self.certain = held, certain
        self._settled_s = settled_s
        self._newest: dict[str, tuple[Mapping[str, float], float]] = {}  # of each node, and since when

    def see(self, held: Amounts, now_s: float, *, at_once: bool = False) -> bool:
        """Note what they hold at one time. Return whether :attr:`held` has changed: each node of it follows amounts that stay for a
        while. ``at_once``: it follows these amounts now."""
        settled = dict(self.held)
        for node in {*held, *self.held}:
            here = held.get(node, {})
            newest, since_s = self._newest.get(node, (self.held.get(node, {}), now_s))
            if here != newest:
                newest, since_s = here, now_s
            self._newest[node] = newest, since_s
            if at_once or now_s - since_s >= self._settled_s:
                settled[node] = here
        settled = {node: amounts for node, amounts in settled.items() if amounts}
        self._newest = {node: self._newest[node] for node in {*held, *settled}}
        changed = settled != self.held
        if changed:
            self.held = settled
        return changed


def summed(*parts: Amounts) -> dict[str, dict[str, float]]:
    """The sums of these amounts."""
    sums: dict[str, Counter[str]] = {}
    for amounts in parts:
        for node, of_node in amounts.items():
            sums.setdefault(node, Counter()).update(of_node)
    return {node: dict(amounts) for node, amounts in sums.items()}


def without(amounts: Amounts, taken: Amounts) -> dict[str, dict[str, float]]:
    """The amounts that are left without those ``taken``, never less than nothing."""
    left = {
        node: {name: round(value - taken.get(node, {}).get(name, 0.0), DIGITS) for name, value in of_node.items()}
        for node, of_node in amounts.items()
    }
    positive = {node: {name: value for name, value in of_node.items() if value > 0} for node, of_node in left.items()}
    return {node: of_node for node, of_node in positive.items() if of_node}
