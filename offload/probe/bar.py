"""The progress bar of a probe."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offload.report.terminal.live_line import stderr_console


def bar(quiet: bool) -> Progress:
    """A progress bar on stderr, which disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr_console(quiet=quiet), transient=True)
