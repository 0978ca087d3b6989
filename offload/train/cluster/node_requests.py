"""A run's requests to the cluster's autoscaler: placement groups that wait for nodes with room for them.

Ray's ``request_resources`` does not fit. A cluster has one such request, so two runs, or a run and a Ray Data pipeline, overwrite
each other's. It also outlives a killed run and keeps its nodes. A placement group, however, belongs to its job. A run asks only for
missing nodes: nodes in use stay anyway, and idle ones may go.

Where it stops: :mod:`offload.train.driver.fleet.room` computes what is missing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from offload.model.placement import Bundle
from offload.train.cluster.holdings import Holdings

MOST_WAITING = 1000  # placement groups: Ray goes through all of them whenever something changes


class NodeRequests:
    """The requests of one run; empty at first. Several threads may call its methods."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._groups: dict[Bundle, list[Any]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        """Ask for this many of each bundle besides the present nodes, and withdraw any earlier request.

        A group that finds room, on a new node or where a process ended, holds it, and this call releases it again: so call it often.
        With ``hold``, granted room is kept until a call without ``hold``, so that early nodes stay until the rest arrive. Does nothing
        after :meth:`close`: a run that ends at once does not wait for the thread that may be about to ask.
        """
        with self._lock:
            if not self._closed:
                self._ask(missing, hold=hold)

    def _ask(self, missing: Mapping[Bundle, int], *, hold: bool) -> None:
        room = self._room()
        for bundle in self._groups.keys() | missing.keys():
            groups = self._groups.setdefault(bundle, [])
            # A granted group has done its work: the node is here. Kept, it would hold room that workers need.
            granted = [group for group in groups if group.id.hex() in room]
            waiting = [group for group in groups if group.id.hex() not in room]
            count = min(missing.get(bundle, 0), MOST_WAITING)
            keep, release = (granted, []) if hold else ([], granted)
            for group in [*release, *waiting[count:]]:
                self._holdings.remove_group(group)
            more = [self._holdings.new_group([dict(bundle)]) for _ in range(count - len(waiting))]
            self._groups[bundle] = [*keep, *waiting[:count], *more]

    def held(self) -> dict[str, dict[str, float]]:
        """The resources that these requests hold, by node id."""
        by_node: dict[str, Counter[str]] = {}
        room = self._room()
        for bundle, groups in self._groups.items():
            for node in (room[group.id.hex()] for group in groups if group.id.hex() in room):
                by_node.setdefault(node, Counter()).update(dict(bundle))
        return {node: dict(amounts) for node, amounts in by_node.items()}

    def _room(self) -> dict[str, str]:
        """The node of each group that found room, by the group's id."""
        if not any(self._groups.values()):
            return {}
        table = placement_group_table().items()
        return {name: entry["bundles_to_node_id"][0] for name, entry in table if entry["state"] == "CREATED"}

    def close(self) -> None:
        """Withdraw all requests."""
        with self._lock, contextlib.suppress(RuntimeError, ray.exceptions.RayError):  # the cluster may be gone
            self._closed = True
            self._ask({}, hold=False)
