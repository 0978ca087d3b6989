"""Whether this machine is a node of a cluster, before this process is connected to it, and the free resources of each node.

A driver must run on a node. Elsewhere, ``ray.init`` looks in vain for a node on this machine, for a minute, and then says that
nothing matched. Where it stops: Ray decides whether it may use the node. Where Ray does not tell (:mod:`offload.ray_private.membership`),
``ray.init`` finds out.
"""

from __future__ import annotations

import os
import time

from offload.ray_private import membership
from offload.ray_private.free_resources import free_resources
from offload.ray_private.membership import addresses_here
from offload.train.cluster.ray_settings import settled, uses_token

__all__ = ["addresses_here", "free_resources", "has_node", "is_node_of", "use_known_token"]

LOOK_S = 0.2


def is_node_of(address: str, within_s: float) -> bool:
    """Return whether a node that runs on this machine belongs to the cluster at ``host:port``, or joins it within ``within_s`` seconds.
    True where Ray does not tell.

    Raises Ray's error if the cluster refuses to answer, for example without its token.
    """
    until = time.monotonic() + within_s
    with settled():
        use_known_token()
        while True:
            here = membership.nodes_here()
            sockets = membership.sockets_at(address, within_s) if here else []
            if here is None or sockets is None:
                return True
            # The processes of this machine include those of nodes in its containers, which cannot be used from outside.
            if any(os.path.exists(path) for node, path in sockets if node in here):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)


def has_node(address: str, node_id: str, within_s: float) -> bool:
    """Return whether a node belongs to the cluster at ``host:port``. Something must listen there: if nothing answers, Ray ends this
    process. True where Ray does not tell.

    Raises Ray's error if the cluster refuses to answer, for example without its token.
    """
    with settled():
        use_known_token()
        sockets = membership.sockets_at(address, within_s)
        return sockets is None or any(node == node_id for node, _ in sockets)


def use_known_token() -> None:
    """Use token authentication if the mode is unset and the environment or Ray's token file has a token. ``ray.init`` does the same, but
    only later."""
    if not uses_token():
        membership.enable_known_token()
