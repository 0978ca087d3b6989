"""Whether this machine is a node of a cluster, and what is free on each of its nodes: what is private to Ray about nodes.

A driver runs on a node only. Elsewhere ``ray.init`` looks for one on this machine, in vain, for a minute, and then says that
nothing matched. Where it stops: whether the node is one that Ray may use is Ray's to say.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ray._private import services
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient  # type: ignore[attr-defined]

LOOK_S = 0.2


def is_node_of(address: str, within_s: float) -> bool:
    """Whether a node that runs on this machine belongs to the cluster at ``host:port``, or does so ``within_s`` seconds.

    Raises what Ray does where the cluster refuses to say, for lack of its token, say.
    """
    until = time.monotonic() + within_s
    while True:
        here = {str(node) for node in services.find_node_ids()}  # type: ignore[no-untyped-call]
        # A node in a container of this machine is seen among its processes, and cannot be used from outside.
        if here and any(os.path.exists(path) for node, path in _sockets_at(address, within_s) if node in here):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)


def addresses_here() -> tuple[str, ...]:
    """The clusters that nodes on this machine belong to, ``host:port`` each; that of the last ``ray start`` comes first."""
    last: str | None = services.find_bootstrap_address(None)
    others = sorted(map(str, services.find_gcs_addresses()))  # type: ignore[no-untyped-call]
    return tuple(dict.fromkeys([last, *others] if last else others))


def free_resources() -> dict[str, dict[str, float]]:
    """By node id, the amount of each resource that nobody holds; what is held whole is left out. Some tenths of a second old."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def _sockets_at(address: str, within_s: float) -> list[tuple[str, str]]:
    """The ids of a cluster's nodes, and where drivers reach them on their machine."""
    client: Any = GcsClient(address=address)
    return [(node.hex(), each.raylet_socket_name) for node, each in client.get_all_node_info(timeout=within_s).items()]
