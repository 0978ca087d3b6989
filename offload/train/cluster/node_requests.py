"""A run's requests to the cluster's autoscaler: placement groups that wait for nodes with room for them.

Ray's ``request_resources`` does not suit. A cluster has one such request, so that two runs, or a run and a Ray Data pipeline, overwrite
each other's. It also outlives a killed run, with the nodes that it keeps. A placement group belongs to its job. A run asks only for
missing nodes: nodes in use stay anyway, and idle ones may go.

Where it stops: :mod:`offload.train.driver.fleet.room` computes what is missing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from offload.model.bundle import Bundle

MOST_WAITING = 1000  # placement groups: Ray goes through all of them whenever something changes


class NodeRequests:
    """The requests of one run; nothing at first."""

    def __init__(self) -> None:
        self._groups: dict[Bundle, list[Any]] = {}

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        """Ask for this many of each bundle beside the present nodes, and withdraw any earlier request. Call it often: a group that
        has found room, on a node that joined or where a process ended, holds it. That is given back here; with ``hold`` it is
        kept until a call without it, so that what came first is still there when the rest comes."""
        room = self._room()
        for bundle in self._groups.keys() | missing.keys():
            groups = self._groups.setdefault(bundle, [])
            came = [group for group in groups if group.id.hex() in room]
            waiting = [group for group in groups if group.id.hex() not in room]
            count = min(missing.get(bundle, 0), MOST_WAITING)
            kept, left = (came, []) if hold else ([], came)
            for group in [*left, *waiting[count:]]:
                remove_placement_group(group)
            more = [placement_group([dict(bundle)]) for _ in range(count - len(waiting))]
            self._groups[bundle] = [*kept, *waiting[:count], *more]

    def held(self) -> dict[str, dict[str, float]]:
        """By node id, what of its resources this holds."""
        held: dict[str, Counter[str]] = {}
        room = self._room()
        for bundle, groups in self._groups.items():
            for node in (room[group.id.hex()] for group in groups if group.id.hex() in room):
                held.setdefault(node, Counter()).update(dict(bundle))
        return {node: dict(each) for node, each in held.items()}

    def _room(self) -> dict[str, str]:
        """The node of each group that has found room, by the group's id."""
        if not any(self._groups.values()):
            return {}
        table = placement_group_table().items()
        return {name: told["bundles_to_node_id"][0] for name, told in table if told["state"] == "CREATED"}

    def close(self) -> None:
        """Ask for nothing any more."""
        with contextlib.suppress(RuntimeError, ray.exceptions.RayError):  # the cluster may be gone
            self.ask({})
