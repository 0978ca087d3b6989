"""Describe the end of a training process in one sentence: the worker, its host, its exit code or signal, and its log."""

from __future__ import annotations

import signal

from offload.train.cluster.ray_processes import how_it_ended


def sentence(rank: int, host: str, pid: int, status: int | None, log: str | None, *, ray_killed: bool = False) -> str:
    """The death in words, without a full stop. ``status``: the exit status, negative for a signal; ``ray_killed``: whether Ray ended
    the process to free memory."""
    if ray_killed:
        how = "was killed by Ray, since the node's memory ran low"
    elif status is None:
        how = "exited or was killed; its exit status is unknown"
    else:
        how = how_it_ended(status)
    if status == -signal.SIGKILL and not ray_killed:
        how += ", as the kernel does when memory runs out"
    return f"worker {rank} on {host} (process {pid}) {how}" + (f"; its log is {log}" if log else "")
