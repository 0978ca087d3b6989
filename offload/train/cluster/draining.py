"""Nodes that are about to leave the cluster. Only this module touches Ray's private interface to draining.

It imports neither torch nor Ray Train: a watcher of notices (:mod:`offload.train.cluster.notices`) lives on every spot node.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]

DRAIN_TIMEOUT_S = 5.0


def draining_nodes() -> set[str]:
    """The ids of the nodes that are alive and under notice to leave."""
    return set(ray._private.state.state.get_draining_nodes())


def drain(node_id: str, why: str, deadline_at: float) -> None:
    """Tell the cluster that a node will be gone at ``deadline_at``, in seconds since 1970, as ``ray drain-node`` does.

    Raises ray.exceptions.RayError if the cluster does not accept it.
    """
    worker: Any = ray._private.worker.global_worker
    at_ms = int(deadline_at * 1000)
    # No node refuses this reason.
    worker.gcs_client.drain_node(node_id, DRAIN_NODE_REASON_PREEMPTION, why, at_ms, timeout=DRAIN_TIMEOUT_S)
