"""Ray's private data about nodes: whether this machine is a node of a cluster, and the free resources of each node.

A driver must run on a node. Elsewhere, ``ray.init`` looks in vain for a node on this machine, for a minute, and then says that
nothing matched. Where it stops: Ray decides whether it may use the node.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from ray._private import services
from ray._private.authentication import authentication_token_setup
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from offload.train.cluster.ray_settings import settled, uses_token

LOOK_S = 0.2


def is_node_of(address: str, within_s: float) -> bool:
    """Return whether a node that runs on this machine belongs to the cluster at ``host:port``, or joins it within ``within_s`` seconds.

    Raises Ray's error if the cluster refuses to answer, for example without its token.
    """
    until = time.monotonic() + within_s
    with settled():
        use_known_token()
        while True:
            here = {str(node) for node in services.find_node_ids()}  # type: ignore[no-untyped-call]
            # The processes of this machine include those of nodes in its containers, which cannot be used from outside.
            if here and any(os.path.exists(path) for node, path in _sockets_at(address, within_s) if node in here):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)


def has_node(address: str, node_id: str, within_s: float) -> bool:
    """Return whether a node belongs to the cluster at ``host:port``. Something must listen there: if nothing answers, Ray ends this
    process.

    Raises Ray's error if the cluster refuses to answer, for example without its token.
    """
    with settled():
        use_known_token()
        return any(node == node_id for node, _ in _sockets_at(address, within_s))


def use_known_token() -> None:
    """Use token authentication if the mode is unset and the environment or Ray's token file has a token. ``ray.init`` does the same, but
    only later."""
    if uses_token():
        return
    level = authentication_token_setup.logger.level
    authentication_token_setup.logger.setLevel(logging.ERROR)  # its warning says that this is the default
    try:
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        authentication_token_setup.logger.setLevel(level)


def addresses_here() -> tuple[str, ...]:
    """The addresses (``host:port``) of the clusters with a node on this machine, the one of the last ``ray start`` first."""
    last: str | None = services.find_bootstrap_address(None)
    others = sorted(map(str, services.find_gcs_addresses()))  # type: ignore[no-untyped-call]
    return tuple(dict.fromkeys([last, *others] if last else others))


def free_resources() -> dict[str, dict[str, float]]:
    """The free amount of each resource, by node id. Resources that are fully in use are missing. The data is some tenths of a second
    old."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def _sockets_at(address: str, within_s: float) -> list[tuple[str, str]]:
    """The ids of a cluster's nodes, and their sockets for drivers on the same machine."""
    client: Any = GcsClient(address=address)
    return [(node.hex(), info.raylet_socket_name) for node, info in client.get_all_node_info(timeout=within_s).items()]
