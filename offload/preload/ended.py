"""The exit statuses of processes that a server of this machine forked, as recorded by :mod:`offload.ray_private.preload.server`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from offload.preload.python import socket_folder

ENDED = "*.ended"
RECENT_S = 120.0  # older records may belong to another process: the kernel reuses process ids


def exit_status(pid: int, within_s: float = 0.0) -> int | None:
    """The exit status of a process that has just ended, negative if a signal ended it; None if it is still unknown after
    ``within_s``."""
    until = time.monotonic() + within_s
    while (status := _written(pid)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return status


def _written(pid: int) -> int | None:
    newest: tuple[float, int] | None = None
    for file in Path(socket_folder()).glob(ENDED):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text(encoding="ascii").splitlines():
                ended, status, at = map(int, line.split())
                if ended == pid and time.time() - at < RECENT_S:
                    newest = max(newest or (0.0, 0), (float(at), status))
    return None if newest is None else newest[1]
