"""Describe the end of a worker's process in one sentence: the worker, its host, its exit code or signal, and its log.

Ray only sees a broken connection. The process that forked the worker on its node knows the exit status
(:mod:`offload.preload.server`), and a task asks for it there. Only this module touches Ray's private data about dead actors.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import ray
import ray._private.worker
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.preload.ended import exit_status
from offload.train.cluster.ray_processes import how_it_ended

STATUS_S = 1.0  # time for the status to be written
ANSWER_S = 8.0  # time for the node to answer; it may be gone
OUT_OF_MEMORY = "oom_context"  # Ray's name for its memory monitor's reason


def how_worker_ended(rank: int, error: BaseException) -> str | None:
    """The sentence, without a full stop, for an error caused by a dead worker; None if no process is known to have died."""
    died: Any = getattr(error, "health_check_failure", error)
    if not isinstance(died, ray.exceptions.RayActorError) or not died.actor_id:
        return None
    actor: Any = actors(died.actor_id)
    node, pid = actor["Address"]["NodeID"], int(actor["Pid"])
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        status, host, log = ray.get(_exit_report.options(scheduling_strategy=place).remote(pid), timeout=ANSWER_S)
    except ray.exceptions.RayError:
        return f"worker {rank} ended with its node {actor['Address']['IPAddress']}"
    return sentence(rank, host, pid, status, log, ray_killed=actor["DeathCause"].WhichOneof("context") == OUT_OF_MEMORY)


def sentence(rank: int, host: str, pid: int, status: int | None, log: str | None, *, ray_killed: bool = False) -> str:
    """The death in words. ``ray_killed``: whether Ray ended the process to free memory."""
    if ray_killed:
        how = "was killed by Ray, since the node's memory ran low"
    elif status is None:
        how = "exited or was killed; its exit status is unknown"
    else:
        how = how_it_ended(status)
    if status == -signal.SIGKILL and not ray_killed:
        how += ", as the kernel does when memory runs out"
    return f"worker {rank} on {host} (process {pid}) {how}" + (f"; its log is {log}" if log else "")


@ray.remote(num_cpus=0)
def _exit_report(pid: int) -> tuple[int | None, str, str | None]:
    """Return the exit status of a process of this node, the host's name, and the file of its standard error."""
    node: Any = ray._private.worker._global_node
    logs = sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err"))
    return exit_status(pid, STATUS_S), socket.gethostname(), str(logs[-1]) if logs else None
