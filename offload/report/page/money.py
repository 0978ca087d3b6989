"""The cost of a run: the price of every node, and the dollars spent up to each second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from offload.model.catalog import Catalog
from offload.prices import built_in
from offload.report.events import RunStarted
from offload.report.json_values import number, table
from offload.report.page.node_history import Node
from offload.report.page.records import Floats, Records


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars per hour.

    Args:
        catalog: node types with their prices.
        own: prices that the user gives, by instance type or by the name of a node. They count before all others.
        recorded: prices that the run wrote down, by instance type, without those for which the catalog has a price of the user's.
    """

    catalog: Catalog
    own: Mapping[str, float]
    recorded: Mapping[str, float]

    @staticmethod
    def of(records: Records, catalog: Catalog, own: Mapping[str, float]) -> Prices:
        """The prices that hold for a run."""
        # A run also records the built-in prices. A price of the user's own catalog overrides them: the user passes it now.
        ours = built_in().nodes
        newer = {
            name
            for name, kind in catalog.nodes.items()
            if name not in ours or kind.usd_per_hour != ours[name].usd_per_hour
        }
        recorded: dict[str, float] = {}
        for event in records.events:
            for name, usd in table(event.usd_per_hour).items() if isinstance(event, RunStarted) else ():
                if number(usd) > 0 and name not in newer:
                    recorded[str(name)] = number(usd)
        return Prices(catalog=catalog, own=own, recorded=recorded)

    def of_node(self, node: Node) -> float | None:
        """The price of a node; None if it is unknown. Spot nodes cost the catalog's spot price where it has one."""
        kind = node.instance_type or ""
        for price in (self.own.get(node.name), self.own.get(kind)):
            if price is not None:
                return price
        sold = self.catalog.nodes.get(kind)
        if node.spot and sold is not None and sold.spot_usd_per_hour is not None:
            return sold.spot_usd_per_hour
        if kind in self.recorded:
            return self.recorded[kind]
        return None if sold is None else sold.usd_per_hour


@dataclass(frozen=True)
class Spending:
    """The dollars of a run over its seconds. ``spans``: (from, to, dollars per second) of each node's presence."""

    spans: tuple[tuple[float, float, float], ...]

    @staticmethod
    def of(nodes: Sequence[Node], prices: Prices) -> Spending | None:
        """The spending on these nodes; None if there are none, or the price of one is unknown."""
        spans = []
        for node in nodes:
            usd = prices.of_node(node)
            if usd is None:
                return None
            spans += [(began, ended, usd / 3600) for began, ended in node.there]
        return Spending(tuple(spans)) if spans else None

    def up_to(self, seconds: ArrayLike) -> Floats:
        """Dollars spent up to these seconds of the run."""
        at = np.asarray(seconds, dtype=np.float64)
        spent = np.zeros_like(at)
        for began, ended, usd in self.spans:
            spent = spent + np.clip(at - began, 0.0, ended - began) * usd
        return spent

    def usd_per_hour(self, at_s: float) -> float:
        """Dollars per hour of the nodes that were there then: where a session begins as the one before it ends, of the earlier one's."""
        there = [usd for began, ended, usd in self.spans if began < at_s <= ended]
        return 3600 * math.fsum(there or [usd for began, _, usd in self.spans if began == at_s])


def unpriced(nodes: Sequence[Node], prices: Prices) -> list[str]:
    """The nodes without a known price, by instance type where they have one."""
    return list(dict.fromkeys(node.instance_type or node.name for node in nodes if prices.of_node(node) is None))
