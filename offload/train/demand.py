"""What a run asks the cluster's autoscaler for: placement groups that wait for nodes with room for them.

Not Ray's ``request_resources``: of that there is one for the whole cluster, so that two runs, or a run and a Ray Data pipeline,
overwrite each other's, and it outlives a run that is killed, with the nodes that it keeps. A placement group belongs to its
job. Only what is missing is asked for: nodes that are in use stay anyway, and those that are not may go.

Where it stops: how much is missing is found by :mod:`offload.train.resizing`.
"""

from __future__ import annotations

import contextlib
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
        self._waiting: dict[Bundle, list[Any]] = {}

    def ask(self, missing: Mapping[Bundle, int]) -> None:
        """Ask for so many of each bundle beside what there is, and no longer for anything else. To be called often: a group that
        has found room holds it, and is removed here."""
        self._release()
        for bundle in self._waiting.keys() | missing.keys():
            waiting = self._waiting.setdefault(bundle, [])
            count = min(missing.get(bundle, 0), MOST_WAITING)
            while len(waiting) > count:
                remove_placement_group(waiting.pop())
            while len(waiting) < count:
                waiting.append(placement_group([dict(bundle)]))

    def _release(self) -> None:
        """Give back what came: on a node that joined, or where a process ended for a moment."""
        if not any(self._waiting.values()):
            return
        table = placement_group_table()
        for bundle, waiting in self._waiting.items():
            came = [group for group in waiting if table.get(group.id.hex(), {}).get("state") == "CREATED"]
            for group in came:
                remove_placement_group(group)
            self._waiting[bundle] = [group for group in waiting if group not in came]

    def close(self) -> None:
        """Ask for nothing any more."""
        with contextlib.suppress(RuntimeError, ray.exceptions.RayError):  # the cluster may be gone
            self.ask({})
