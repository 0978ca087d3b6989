"""Describe the end of a worker's process in one sentence: the worker, its host, its exit code or signal, and its log.

Ray only sees a broken connection. The process that forked the worker on its node knows the exit status
(:mod:`offload.ray_private.preload.server`), and a task asks for it there. Where it stops: :mod:`offload.ray_private.actor_ends` reads Ray's
tables of actors.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.preload.ended import exit_status
from offload.ray_private.actor_ends import actor_end, log_of
from offload.train.cluster.ray_processes import how_it_ended

STATUS_S = 1.0  # time for the status to be written
ANSWER_S = 8.0  # time for the node to answer; it may be gone


def how_worker_ended(rank: int, error: BaseException) -> str | None:
    """The sentence, without a full stop, for an error caused by a dead worker; None if no process is known to have died."""
    died: Any = getattr(error, "health_check_failure", error)
    if not isinstance(died, ray.exceptions.RayActorError) or not died.actor_id:
        return None
    end = actor_end(died.actor_id)
    if end is None:
        return None
    place = NodeAffinitySchedulingStrategy(end.node_id, soft=False)
    try:
        status, host, log = ray.get(_exit_report.options(scheduling_strategy=place).remote(end.pid), timeout=ANSWER_S)
    except ray.exceptions.RayError:
        return f"worker {rank} ended with its node {end.address}"
    return sentence(rank, host, end.pid, status, log, ray_killed=end.out_of_memory)


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
    log = log_of(pid)
    return exit_status(pid, STATUS_S), socket.gethostname(), None if log is None else str(log)
