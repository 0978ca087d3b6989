"""Nodes that are about to leave the cluster.

It imports neither torch nor Ray Train: a watcher of notices (:mod:`offload.train.cluster.notices`) lives on every spot node.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import ray

from offload.ray_private.part import Part

DRAIN_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 60.0
REASON = "DRAIN_NODE_REASON_PREEMPTION"  # no node refuses it

PART = Part(
    name="draining nodes",
    purpose="see which nodes are under notice, and announce a spot notice to the cluster",
    without="the command ray drain-node announces a notice, and a run notices a node's end when it comes",
    cost="a run does not commit before a drained node leaves: it repeats the steps since its last checkpoint",
    needs=(
        "ray._private.state:state.get_draining_nodes",
        "ray._private.worker:global_worker",
        "ray._raylet:InnerGcsClient.drain_node",
        f"ray.core.generated.autoscaler_pb2:{REASON}",
    ),
)


def draining_nodes() -> set[str]:
    """The ids of the nodes that are alive and under notice to leave; empty where Ray does not tell."""

    def private() -> set[str]:
        from ray._private.state import state

        return set(state.get_draining_nodes())

    return PART.use(private, otherwise=set)


def drain(node_id: str, why: str, deadline_at: float) -> None:
    """Tell the cluster that a node will be gone at ``deadline_at``, in seconds since 1970, as ``ray drain-node`` does.

    Raises ray.exceptions.RayError if the cluster does not accept it.
    """

    def private() -> None:
        from ray._private.worker import global_worker
        from ray.core.generated import autoscaler_pb2

        worker: Any = global_worker
        reason = getattr(autoscaler_pb2, REASON)
        worker.gcs_client.drain_node(node_id, reason, why, int(deadline_at * 1000), timeout=DRAIN_TIMEOUT_S)

    PART.use(private, otherwise=lambda: _drain_by_command(node_id, why, deadline_at))


def _drain_by_command(node_id: str, why: str, deadline_at: float) -> None:
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "drain-node"),
        *("--address", ray.get_runtime_context().gcs_address, "--node-id", node_id, "--reason", REASON),
        *("--reason-message", why, "--deadline-remaining-seconds", str(max(round(deadline_at - time.time()), 1))),
    ]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        refused: Any = ray.exceptions.RaySystemError
        raise refused(f"ray drain-node failed: {said[-1] if said else error}") from None
