"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """The exit status of a process in words. A negative status is the signal that ended it."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was ended by signal {-status}{name}"
