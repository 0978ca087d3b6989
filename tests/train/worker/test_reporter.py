"""What the user's function prints, on its way to the driver."""

from __future__ import annotations

import contextlib
import io
import sys
from types import SimpleNamespace
from typing import Any

from offload.train.worker.reporter import Forward


def test_every_line_is_forwarded_also_a_last_one_without_an_end() -> None:
    told: list[str] = []
    reporter: Any = SimpleNamespace(event=lambda kind, text: told.append(text))
    raw = io.BytesIO()
    log = io.TextIOWrapper(raw, encoding="utf-8")
    with contextlib.closing(Forward(reporter, log)) as out, contextlib.redirect_stdout(out):
        print("one\ntwo")
        print("loss", end=" ")
        assert told == ["one", "two"]
        print(0.25, end="", flush=True)
    assert told == ["one", "two", "loss 0.25"]
    assert raw.getvalue().decode() == "one\ntwo\nloss 0.25"


def test_programs_ask_of_the_output_what_they_ask_of_any() -> None:
    log = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    reporter: Any = SimpleNamespace(event=lambda kind, text: None)
    with contextlib.redirect_stdout(Forward(reporter, log)):
        sys.stdout.reconfigure(line_buffering=True)
        assert (sys.stdout.encoding, sys.stdout.errors) == ("utf-8", "strict")
        sys.stdout.buffer.write(b"bytes\n")
    assert log.line_buffering


def test_of_a_progress_bar_the_newest_state_is_forwarded() -> None:
    """Each state would be a line of the driver's otherwise, and all of them would wait in memory for the end of the line."""
    told: list[str] = []
    reporter: Any = SimpleNamespace(event=lambda kind, text: told.append(text))
    out = Forward(reporter, io.StringIO())
    for step in range(3):
        out.write(f"\rstep {step}")
    out.write("\n")
    for step in range(3):
        out.write(f"loss {step}\r")
        assert out._rest == f"loss {step}\r"
    out.write("\ndone\r\n\n")
    out.write("half\rwhole\r")
    out.close()
    assert told == ["step 2", "loss 2\ndone\n", "whole"]
