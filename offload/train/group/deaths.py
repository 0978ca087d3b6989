"""Describe in one sentence how a training process ended, with its host, exit code or signal and log, or what it raised."""

from __future__ import annotations

import signal

from offload.process.exits import how_it_ended


def sentence(rank: int, host: str, pid: int, status: int | None, log: str | None, *, ray_killed: bool = False) -> str:
    """The death in words, without a full stop. ``status``: the exit status, negative for a signal; ``ray_killed``: whether Ray ended
    the process to free memory."""
    if ray_killed:
        how = "was killed by Ray, since the node's memory ran low"
    elif status is None:
        how = "exited or was killed; its exit status is unknown"
    else:
        how = how_it_ended(status)
    # The kernel leaves no reason with the process, so this is only the most likely one.
    if status == -signal.SIGKILL and not ray_killed:
        how += ", as the kernel does when memory runs out"
    return f"worker {rank} on {host} (process {pid}) {how}" + (f"; its log is {log}" if log else "")


def first_line(error: BaseException) -> str:
    """An error in a line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
