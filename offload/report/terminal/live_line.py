"""The live line of a run: one changing line on a terminal, a new line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from offload.formatting import GOODPUT_DIFFERS, rate_shown
from offload.report.terminal.standard_streams import is_terminal, write_line

PLAIN_INTERVAL_S = 10.0
WAITING_INTERVAL_S = 30.0


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


def format_line(values: dict[str, Any]) -> str:
    """The live line::

    epoch 3  step 1,200  loss 2.31 | 2,710 samples/s (input 2,950, GPU 2,800) | stall 3% | 4 workers × 64 × 1
    """
    shown = "  ".join(f"{k} {v:.4g}" for k, v in values.get("metrics", {}).items() if isinstance(v, int | float))
    head = f"epoch {values['epoch'] + 1}  step {values['step']:,}" + (f"  {shown}" if shown else "")
    ceilings = [
        f"{name} {rate_shown(values[key])}"
        for name, key in (
            ("input", "input_ceiling_samples_per_s"),
            (values.get("device", "GPU"), "device_ceiling_samples_per_s"),
        )
        if values.get(key)
    ]
    rate = f"{rate_shown(values['samples_per_s'])} samples/s" + (f" ({', '.join(ceilings)})" if ceilings else "")
    many = "s" if values["workers"] != 1 else ""
    split = f"{values['workers']} worker{many} × {values['local_batch_size']} × {values['accum_steps'] + 1}"
    parts = [head, rate, f"stall {values['stall']:.0%}", split]
    goodput = values.get("goodput", math.inf)
    if goodput < GOODPUT_DIFFERS * values["samples_per_s"]:
        parts.append(f"goodput {rate_shown(goodput)}")
    return " | ".join(parts)


class LiveLine:
    """A context manager that shows lines and notes on standard error, and what the user's code prints on the stream of its own.

    ``quiet``: whether it shows no lines and notes of its own.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = stderr_console(quiet=quiet)
        self._live = (
            Live(
                Text("starting"),
                console=self._console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=is_terminal("stdout"),  # otherwise what the program prints would go to standard error
            )
            if self._console.is_terminal and not quiet
            else None
        )
        self._shown_at = self._waited_at = 0.0

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):  # see _say
                self._live.stop()

    def follow(self, run_dir: Path) -> None:
        """The run has begun to write this directory. The line needs nothing of it."""

    def update(self, values: dict[str, Any]) -> None:
        """Show the newest interval."""
        self.progress(format_line(values))

    def progress(self, line: str) -> None:
        """Show how far the work has come: one changing line on a terminal, a line every few seconds elsewhere."""
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown_at = time.monotonic()
            self._say(line)

    def status(self, text: str) -> None:
        """Show the run's progress before the first measurement."""
        self._waited_at = time.monotonic()
        if self._live is not None:
            self._live.update(Text(text, style="dim"))
        else:
            self._say(text)

    def waiting(self, text: str) -> None:
        """Show what the run waits for, and its progress: one changing line on a terminal, a line every half minute elsewhere."""
        if self._live is not None:
            self._live.update(Text(text, style="dim"))
        elif time.monotonic() - self._waited_at >= WAITING_INTERVAL_S:
            self._waited_at = time.monotonic()
            self._say(text)

    def printed(self, text: str, *, stream: str = "stdout", rank: int | None = None) -> None:
        """Show output of the user's code: of the training function on the worker of this rank, or of a data set."""
        prefix = f"[rank {rank}] " if rank else ""
        for line in text.split("\n"):
            self._show(stream, prefix + line)

    def note(self, text: str) -> None:
        """Show a separate line, which stays."""
        self._say(text)
        if sys.stderr is not None:  # it is None in a program that was started without one
            with contextlib.suppress(OSError):
                sys.stderr.flush()

    def _show(self, stream: str, line: str) -> None:
        """Write a line of the user's. On a terminal, it goes above the live line."""
        if self._live is None or not is_terminal(stream):
            write_line(stream, line)
            return
        with contextlib.suppress(OSError):
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def _say(self, line: str) -> None:
        """Write a line. Where standard error is gone, such as that of a closed terminal, say nothing more: the run has to go on, and to
        commit a checkpoint if it is asked to end."""
        try:
            self._console.print(line, soft_wrap=True, markup=False)
        except OSError:
            self._console.quiet = True
