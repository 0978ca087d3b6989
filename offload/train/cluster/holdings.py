"""What this process's runs hold on the cluster, under names that are known before anything is created.

An interrupt may come after Ray has created an actor or a placement group and before its handle is stored. The name is then all that is
left, and the end of the run, or the next run, uses it to release the actor or group.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from offload.pipeline.pool.ray_state import remove_groups_of
from offload.ray_private.cluster_tables import id_of

NAMESPACE = "offload"
HUB = " hub"  # the end of a hub's name
DESK = " desk"  # the end of a desk's name
ARBITER = "arbiter"  # the whole name: a cluster has one
END_S = 3.0  # time for the processes of killed actors to end
LOOK_S = 0.05

_GONE = (ValueError, RuntimeError, ray.exceptions.RayError)  # no such name; no connection; no cluster


class Holdings:
    """What one run holds. It belongs to the thread that makes it. ``rooms``: how the names of its placement groups begin."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.rooms = f"offload-room-{secrets.token_hex(8)}-"
        self._actors: dict[str, None] = {}  # names
        self._groups: dict[str, Any] = {}  # by name; None until the handle is here
        self._makers: set[str] = set()  # ids of ended actors
        _all.append(self)

    def note_actor(self, name: str) -> None:
        """Note an actor that is about to start, by its name in NAMESPACE."""
        self._actors[name] = None

    def forget_actor(self, name: str) -> None:
        """Note that this run has no such actor."""
        self._actors.pop(name, None)

    def new_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        *,
        strategy: str = "PACK",
        selectors: Sequence[Mapping[str, str]] = (),
    ) -> Any:
        """A placement group of these bundles. ``selectors``: for each bundle the label selector that its node must meet, or none at all."""
        name = f"{self.rooms}{secrets.token_hex(4)}"
        # Noted before it exists: an interrupt may come right behind its creation.
        self._groups[name] = None
        labels = {"bundle_label_selector": [dict(selector) for selector in selectors]} if selectors else {}
        group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy, name=name, **labels)
        self._groups[name] = group
        return group

    def held(self) -> dict[str, dict[str, float]]:
        """The resources that this run's placement groups hold, by node id."""
        held: dict[str, Counter[str]] = {}
        for entry in placement_group_table().values():
            if entry["state"] == "CREATED" and entry["name"].startswith(self.rooms):
                for bundle, node in entry["bundles_to_node_id"].items():
                    held.setdefault(node, Counter()).update(entry["bundles"][bundle])
        return {node: dict(amounts) for node, amounts in held.items()}

    def remove_group(self, group: Any) -> None:
        """Remove a placement group."""
        remove_placement_group(group)
        for name in [name for name, known in list(self._groups.items()) if known is group]:
            self._groups.pop(name, None)

    def release(self) -> None:
        """End all actors and remove all placement groups, including those that the actors created. It may be called again after an
        interrupt."""
        # The newest first, in case it depends on an older one.
        for name in reversed(list(self._actors)):
            with contextlib.suppress(*_GONE):
                actor = ray.get_actor(name, namespace=NAMESPACE)
                if (maker := id_of(actor)) is not None:
                    self._makers.add(maker)
                ray.kill(actor)
            self.forget_actor(name)
        for name in list(self._groups):
            with contextlib.suppress(*_GONE):
                remove_placement_group(get_placement_group(name))
            self._groups.pop(name, None)
        # A placement group that an actor was just asking for outlives the actor.
        until = time.monotonic() + END_S
        with contextlib.suppress(*_GONE):
            while self._makers and not remove_groups_of(self._makers) and time.monotonic() < until:
                time.sleep(LOOK_S)
            remove_groups_of(self._makers)

    def drop(self) -> None:
        """Forget everything: it is released, or the cluster is gone."""
        with contextlib.suppress(ValueError):
            _all.remove(self)


def worker_title(run: str) -> str:
    """What Ray's tables call a worker of this run."""
    return f"{run} worker"


_all: list[Holdings] = []


def left() -> list[Holdings]:
    """The holdings that finished runs have not released. A thread has one run at a time, so its earlier runs are finished."""
    here = threading.current_thread()
    return [holdings for holdings in list(_all) if holdings.thread is here or not holdings.thread.is_alive()]
