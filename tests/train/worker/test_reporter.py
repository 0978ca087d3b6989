"""What the user's function prints, on its way to the driver."""

from __future__ import annotations

import contextlib
import io
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from offload.report.sentences import sentence
from offload.train.messages import Orders
from offload.train.worker import reporter as reporter_module
from offload.train.worker.reporter import Forward, Reporter
from offload.train.worker.watchdog import Watchdog
from tests.helpers import eventually


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


@pytest.mark.parametrize("call", ["ctx.report(loss)", ""])
def test_a_call_that_waits_long_for_other_workers_is_told_once(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As under ``if ctx.rank == 0:`` within the loop, where the others wait for this worker's gradients. A wait for data is none."""
    monkeypatch.setattr(reporter_module, "PATIENCE_S", 0.0)
    pushes: list[Any] = []
    hub: Any = SimpleNamespace(push=lambda push: pushes.append(push) or Orders())
    start: Any = SimpleNamespace(orders=Orders(), attempt=0)
    watchdog = Watchdog(deadline_s=1000)
    reporter = Reporter(hub, 0, start, watchdog, node="here", interval_s=0.01)

    def pushed_since(number: int) -> bool:
        return len(pushes) > number + 2

    for _ in range(2):
        with watchdog.waiting(call):
            eventually(partial(pushed_since, len(pushes)))
        eventually(partial(pushed_since, len(pushes)))
    reporter.close()
    events = [event for push in pushes for event in push.events]
    assert [(each["event"], each["call"]) for each in events] == [("worker_waits", call)] * (2 if call else 0)
    assert all(f"worker 0 has waited 0 s in {call} for" in (sentence("worker_waits", event) or "") for event in events)
