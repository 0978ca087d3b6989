"""The live line of a run, beside what programs print, and where streams are gone."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from offload.report.terminal.live_line import LiveLine


class Stderr(io.StringIO):
    """A standard error that raises ``error`` while it is ``gone``."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error, self.gone = error, False

    def write(self, text: str) -> int:
        if self.gone:
            raise self.error
        return super().write(text)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.EIO, "Input/output error"), id="a closed terminal"),
        pytest.param(BrokenPipeError(errno.EPIPE, "Broken pipe"), id="a closed pipe"),
    ],
)
def test_a_run_goes_on_where_nobody_can_read_its_lines_any_more(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Stderr(error)
    monkeypatch.setattr(sys, "stderr", stderr)
    with LiveLine() as live:
        live.note("before")
        stderr.gone = True
        live.note("stopping: committing a checkpoint first")
        live.printed("a worker's line", stream="stderr", rank=1)
        live.status("starting Ray")
        stderr.gone = False
        live.note("after")
    assert stderr.getvalue() == "before\n"


def test_a_run_needs_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with LiveLine() as live:
        live.note("nobody reads this")


def test_what_programs_print_goes_to_its_stream_though_the_run_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine(quiet=True) as live:
        live.note("a note of the run")
        live.printed("\x1b[31m[red]\x1b[0m", rank=0)
        live.printed("a warning", stream="stderr")
    assert tuple(capsys.readouterr()) == ("\x1b[31m[red]\x1b[0m\n", "a warning\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_that_its_stream_cannot_hold_is_written_as_far_as_it_can(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(raw, encoding="ascii"))
    with LiveLine(quiet=True) as live:
        live.printed("grün", stream=stream)
        assert raw.getvalue() == b"gr\\xfcn\n"
        getattr(sys, stream).close()
        live.printed("nobody reads this", stream=stream)
        monkeypatch.setattr(sys, stream, None)
        live.printed("nobody reads this", stream=stream)


LIVE = """
import sys
from offload.report.terminal.live_line import LiveLine

with LiveLine() as live:
    live.status("a changing line")
    live.printed("the function's line", rank=0)
    print("a callback's line")
    live.printed("a warning", stream="stderr")
    sys.stdin.readline()
"""


@pytest.mark.parametrize("redirected", [True, False])
def test_no_printed_line_mixes_with_the_live_line(tmp_path: Path, *, redirected: bool) -> None:
    """Standard error is a terminal, and standard output a file or the same terminal."""
    mine, theirs = pty.openpty()
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with log.open("wb") as file:
        program = subprocess.Popen(
            [sys.executable, "-c", LIVE],
            stdin=subprocess.PIPE,
            stdout=file if redirected else theirs,
            stderr=theirs,
            env=environment | {"TERM": "xterm"},
        )
    os.close(theirs)
    shown = b""
    while b"a warning" not in shown:
        shown += os.read(mine, 4096)
    program.communicate(b"\n", timeout=800)
    os.close(mine)
    lines = ["the function's line", "a callback's line"]
    assert log.read_text().splitlines() == (lines if redirected else [])
    # An escape sequence erases the live line before each of them.
    text = shown.decode().replace("\x1b[?25l", "")  # it hides the cursor
    printed = [part.rpartition("\x1b[2K")[2].strip() for part in text.split("\r\n")]
    wanted = ["a warning"] if redirected else [*lines, "a warning"]
    assert [line for line in printed if line in (*lines, "a warning")] == wanted
