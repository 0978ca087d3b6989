"""The full-screen view of a run in the process that drives it.

Where it stops: :mod:`offload.report.terminal.watched` draws the state, and :mod:`offload.report.terminal.watched` finds it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from offload.errors import ConfigError, argument
from offload.prices import load_catalog
from offload.process.interrupts import on_screen
from offload.report.page.records import RunReader
from offload.report.page.story import Story
from offload.report.terminal.live_line import LiveLine, stderr_console
from offload.report.terminal.standard_streams import write_line
from offload.report.terminal.watched import Watched, screen, watched

EVERY_S = 2.0
MOST_HELD = 1000  # lines
SHOWN = 8  # lines of output


def check_view(*, quiet: bool, watch: bool) -> None:
    """Raise ConfigError if a run should show both nothing and everything."""
    if watch and quiet:
        raise ConfigError(
            f"{argument('watch', True)} shows a full-screen view, and {argument('quiet', True)} shows nothing: drop one of them."
        )


def live_view(*, quiet: bool, watch: bool) -> LiveLine:
    """What shows a run: the live line, or the full-screen view on a terminal. Raises ConfigError for both flags."""
    check_view(quiet=quiet, watch=watch)
    if watch and stderr_console().is_terminal:
        return FullScreen()
    live = LiveLine(quiet=quiet)
    if watch:
        live.note("standard error is no terminal, so there is a line every ten seconds instead of the full-screen view")
    return live


class FullScreen(LiveLine):
    """A context manager that shows the run on the whole terminal. It holds back what this process prints until the view ends.

    Before :meth:`follow`, it shows the start of the run.
    """

    def __init__(self) -> None:
        self._console = stderr_console()
        self._held: deque[tuple[str, str]] = deque(maxlen=MOST_HELD)  # a stream and a line
        self._status = "starting"
        self._reader: RunReader | None = None
        self._state: Watched | None = None
        self._screen = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._drawn,
        )
        self._ended = threading.Event()
        self._drawing = threading.Thread(target=self._draw, daemon=True, name="full screen")

    def __enter__(self) -> FullScreen:
        self._streams = sys.stdout, sys.stderr
        self._console.file = sys.stderr  # otherwise the console writes to what stands for it
        self._on_screen = on_screen()
        self._on_screen.__enter__()
        self._screen.start()
        sys.stdout, sys.stderr = (
            _HeldStream(stream, lambda line, name=name: self._held.append((name, line)))  # type: ignore[misc]
            for name, stream in zip(("stdout", "stderr"), self._streams, strict=True)
        )
        self._drawing.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._drawing.join()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _HeldStream):
                stream.end()
        sys.stdout, sys.stderr = self._streams
        with contextlib.suppress(OSError):  # the terminal may be closed
            self._screen.stop()
        self._on_screen.__exit__(None, None, None)
        for stream, line in self._held:
            write_line(stream, line)

    def follow(self, run_dir: Path) -> None:
        self._reader = RunReader(run_dir)

    def update(self, values: dict[str, Any]) -> None:
        self._status = ""

    def status(self, text: str) -> None:
        self._status = text
        self._screen.refresh()

    def waiting(self, text: str) -> None:
        self.status(text)

    def note(self, text: str) -> None:
        self._held.append(("stderr", text))

    def _show(self, stream: str, line: str) -> None:
        self._held.append((stream, line))

    def _draw(self) -> None:
        """Read the run and draw it, until the view ends."""
        catalog = load_catalog(None)
        while not self._ended.is_set():
            try:
                if self._reader is not None:
                    self._state = watched(Story(self._reader.read(), catalog, {}), time.time())
                self._screen.refresh()
            except Exception as error:  # a defect of the view must not cost the run its result
                self._status = f"the run goes on, and its view failed ({type(error).__name__}: {error})"
            self._ended.wait(EVERY_S)

    def _drawn(self) -> RenderableType:
        status = Text(self._status, style="dim")
        output = tuple(line for _, line in tuple(self._held)[-SHOWN:])
        if self._state is None:
            return Group(status, *map(Text, output))
        shown = screen(self._state, output)
        return Group(status, shown) if self._status else shown


class _HeldStream:
    """A stream whose lines go to ``line``. For everything else it is the stream that it stands for."""

    def __init__(self, stream: Any, line: Callable[[str], None]) -> None:
        self._stream, self._line, self._begun = stream, line, ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._line(line)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Lines have gone already."""

    def end(self) -> None:
        """Pass on a line without an end."""
        if self._begun:
            self._line(self._begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
