"""The console of progress and notes, on standard error."""

from __future__ import annotations

from rich.console import Console


def stderr_console(*, quiet: bool = False) -> Console:
    """A console that changes lines in place on a terminal alone; elsewhere, in cells of a notebook too, it writes plain lines."""
    console = Console(stderr=True, quiet=quiet, highlight=False)
    if not console.is_jupyter:
        return console
    # A notebook's standard error calls itself a terminal, and keeps every frame of an animation as output.
    return Console(stderr=True, quiet=quiet, highlight=False, force_jupyter=False, force_terminal=False)
