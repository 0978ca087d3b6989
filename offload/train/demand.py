"""What a run asks the cluster's autoscaler for: placement groups that wait for nodes with room for them.

Not Ray's ``request_resources``: of that there is one for the whole cluster, so that two runs, or a run and a Ray Data pipeline,
overwrite each other's, and it outlives a run that is killed, with the nodes that it keeps. A placement group belongs to its
job. Only what is missing is asked for: nodes that are in use stay anyway, and those that are not may go.

Where it stops: how much is missing is found by :mod:`offload.train.resizing`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

MOST_WAITING = 1000  # placement groups: Ray goes through all of them whenever something changes

Bundle = tuple[tuple[str, float], ...]


def bundle_of(resources: Mapping[str, float]) -> Bundle:
    """Resources that one node must have room for, without those of which nothing is asked."""
    return tuple(sorted((name, amount) for name, amount in resources.items() if amount > 0))


class Demand:
    """Of one run. Nothing is asked for at first."""

    def __init__(self) -> None:
        self._groups: dict[Bundle, list[Any]] = {}

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        """Ask for so many of each bundle beside what there is, and no longer for anything else. To be called often: a group that
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
        """Of groups that have found room: by id, the node that it is on."""
        if not any(self._groups.values()):
            return {}
        table = placement_group_table().items()
        return {name: told["bundles_to_node_id"][0] for name, told in table if told["state"] == "CREATED"}

    def close(self) -> None:
        """Ask for nothing any more."""
        with contextlib.suppress(RuntimeError, ray.exceptions.RayError):  # the cluster may be gone
            self.ask({})
