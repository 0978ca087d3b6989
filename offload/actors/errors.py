"""The errors by which a caller learns that a process is gone, whether Ray or this machine ran it."""

from __future__ import annotations

import sys


class ProcessLostError(Exception):
    """A process has ended before it answered a call. The message says how."""


def lost_errors() -> tuple[type[BaseException], ...]:
    """The errors of calls whose process is gone. Only a program that has imported Ray can see Ray's."""
    if (ray := sys.modules.get("ray")) is not None and hasattr(ray, "exceptions"):
        return ProcessLostError, ray.exceptions.RayError
    return (ProcessLostError,)
