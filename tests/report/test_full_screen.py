"""The full-screen view of a run on a real terminal: whatever ends it, the terminal is as before and nothing that was printed is lost."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.report.terminal.full_screen import live_view
from offload.report.terminal.live_line import LiveLine
from tests.helpers import ROOT
from tests.report.runs import eventful

DEADLINE_S = 800.0
ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"

VIEW = """
import sys, threading
from pathlib import Path
from offload.process.interrupts import Interrupts, LastResort, install
from offload.report.terminal.full_screen import live_view

interrupts = Interrupts()
resort = LastResort(interrupts)
install(interrupts)
with live_view(quiet=False, watch=True) as live:
    live.status("starting Ray")
    live.note("a note of the run")
    live.printed("a worker's line", rank=1)
    print("a callback's line")
    sys.stderr.write("a line without an end")
    live.follow(Path(sys.argv[1]))
    how = sys.stdin.readline().strip()
    if how == "error":
        raise ValueError("what the user must see")
    if how == "at once":
        interrupts.end_within(0.0, "the last word")
        threading.Event().wait()
"""


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str | Path) -> None:
        self._mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        # Rich takes COLUMNS and LINES for the size of any terminal.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.shown = b""

    def until(self, words: bytes) -> None:
        """Wait until the program has shown this."""
        while words not in self.shown:
            more = self._more()
            assert more, self.shown
            self.shown += more

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._mine, line.encode() + b"\n")

    def rest(self) -> str:
        """Wait for the program's end. Return what is left on the terminal, without control sequences."""
        while more := self._more():
            self.shown += more
        self.process.wait()
        os.close(self._mine)
        assert (self.shown.count(ENTERS), self.shown.count(LEAVES)) == (1, 1)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown.partition(LEAVES)[2].decode()).replace("\r", "")

    def _more(self) -> bytes:
        ready, _, _ = select.select([self._mine], [], [], DEADLINE_S)
        assert ready, f"the program has shown nothing for {DEADLINE_S:g} s: {self.shown!r}"
        try:
            return os.read(self._mine, 1 << 16)
        except OSError:  # the program has ended
            return b""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """The view of a run in a terminal."""
    started = Terminal(sys.executable, "-c", VIEW, eventful(tmp_path / "vit", ends=False))
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("", ""),
        ("error", "ValueError: what the user must see"),
        ("Ctrl-C", "KeyboardInterrupt"),
        ("at once", "the last word"),
    ],
)
def test_the_terminal_is_as_before_and_holds_what_was_printed(terminal: Terminal, how: str, says: str) -> None:
    terminal.until(b"GPU ceiling")
    terminal.until(b"a callback's line")
    if how == "Ctrl-C":
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.type(how)
    left = terminal.rest()
    assert says in left
    if how != "at once":
        lines = ["a note of the run", "[rank 1] a worker's line", "a callback's line", "a line without an end"]
        assert left.splitlines()[: len(lines)] == lines


def test_without_a_terminal_there_are_lines_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(live_view(quiet=False, watch=True)) is LiveLine
    assert capsys.readouterr().err.startswith("standard error is no terminal, so there is a line every ten seconds")


def test_nothing_and_everything_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="watch=True shows a full-screen view, and quiet=True shows nothing"):
        live_view(quiet=True, watch=True)
