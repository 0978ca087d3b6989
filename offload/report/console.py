"""The console of progress and notes, on standard error."""

from __future__ import annotations

from rich.console import Console


class _Stderr(Console):
    """A console on standard error."""

    def on_broken_pipe(self) -> None:
        """Say nothing more. Rich itself would end the process, and with it a run that has not committed."""
        self.quiet = True


def stderr_console(*, quiet: bool = False) -> Console:
    """A console that changes lines in place on a terminal alone; elsewhere, in cells of a notebook too, it writes plain lines."""
    console = _Stderr(stderr=True, quiet=quiet, highlight=False)
    if not console.is_jupyter:
        return console
    # A notebook's standard error calls itself a terminal, and keeps every frame of an animation as output.
    return _Stderr(stderr=True, quiet=quiet, highlight=False, force_jupyter=False, force_terminal=False)
