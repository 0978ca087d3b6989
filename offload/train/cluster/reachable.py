"""Find nodes whose host or raylet is gone before Ray says so.

Ray's head counts missed heartbeats and takes about half a minute. A connection to the raylet's port tells at once: a host that lost its
raylet refuses it, and a host that is gone does not answer.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import ray

ANSWER_S = 2.0  # several times what a connection takes between hosts of one network
MOST_AT_ONCE = 32


def silent_nodes(node_ids: Collection[str]) -> frozenset[str]:
    """The ids of those nodes that Ray counts as alive and whose raylet takes no connection. It takes :data:`ANSWER_S` at most for
    each :data:`MOST_AT_ONCE` nodes."""
    nodes = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] in node_ids]  # type: ignore[no-untyped-call]
    if not nodes:
        return frozenset()
    with ThreadPoolExecutor(min(len(nodes), MOST_AT_ONCE)) as pool:
        answers = pool.map(_answers, [(str(n["NodeManagerAddress"]), int(n["NodeManagerPort"])) for n in nodes])
        return frozenset(str(node["NodeID"]) for node, answer in zip(nodes, answers, strict=True) if not answer)


def _answers(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=ANSWER_S):
            return True
    except OSError:
        return False
