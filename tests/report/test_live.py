"""The live line of a run whose standard error is gone."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from offload.report.live import LiveLine


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
        live.printed("a worker's line", rank=1)
        live.status("starting Ray")
        stderr.gone = False
        live.note("after")
    assert stderr.getvalue() == "before\n"


def test_a_run_needs_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with LiveLine() as live:
        live.note("nobody reads this")
