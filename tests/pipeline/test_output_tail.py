"""What a process prints, read from its own log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.pipeline.program import output_tail
from offload.pipeline.program.output_tail import LONGEST, OutputTail, Teller, WholeLines
from offload.pipeline.program.printed import SAME, Printed, PrintedLine
from tests.helpers import eventually


@given(st.text(alphabet="ab\r\nü"), st.lists(st.integers(0, 40)))
def test_lines_are_the_same_however_the_text_arrives(text: str, cuts: list[int]) -> None:
    whole, parts = WholeLines(), WholeLines()
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    found = [line for start, stop in pairwise(at) for line in parts.add(text[start:stop])]
    assert found + parts.rest() == whole.add(text) + whole.rest()


def test_of_a_progress_bar_the_newest_state_counts() -> None:
    """Each state would be a line of the driver's otherwise, and all of them would wait in memory for the end of the line."""
    told: list[str] = []
    lines = WholeLines()
    for step in range(3):
        told += lines.add(f"\rstep {step}")
        assert lines.settled() == []
    told += lines.add("\n")
    for step in range(3):
        told += lines.add(f"loss {step}\r")
        assert lines._rest == f"loss {step}\r"
    told += lines.add("\ndone\r\n\n")
    told += lines.add("half\rwhole\r")
    told += lines.rest()
    assert told == ["step 2", "loss 2", "done", "", "whole"]


def test_a_line_that_nobody_ends_comes_once_it_has_settled() -> None:
    lines = WholeLines()
    assert lines.add("is it") == lines.settled() == []
    assert lines.add(" over?") == lines.settled() == []
    assert lines.settled() == ["is it over?"]
    assert lines.add("x" * (LONGEST + 1)) == ["x" * (LONGEST + 1)]


def test_what_ray_tells_its_log_monitor_is_no_output() -> None:
    assert WholeLines().add(":job_id:01000000\n:actor_name:Preprocessor\nhello\n") == ["hello"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield descriptor
    os.close(descriptor)


def test_a_tail_begins_where_the_file_ends_and_waits_for_whole_characters(log: int) -> None:
    os.write(log, b"before\n")
    tail = OutputTail(log, "stderr")
    assert list(tail.read()) == []
    os.write(log, "grü".encode()[:-1])
    assert list(tail.read()) == []
    os.write(log, "ü\n".encode()[1:] + b"\xff\nrest")
    assert list(tail.read()) == [PrintedLine("stderr", "grü"), PrintedLine("stderr", "\ufffd")]
    assert list(tail.read(last=True)) == [PrintedLine("stderr", "rest")]
    tail.close()


def test_there_is_nothing_to_read_of_a_pipe() -> None:
    read, write = os.pipe()
    tail = OutputTail(write, "stdout")
    os.write(write, b"hello\n")
    assert list(tail.read(last=True)) == []
    os.close(read)
    os.close(write)


class _Hub:
    """A hub that answers when the test says so."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Printed]] = []
        self.answers: list[Future[None]] = []
        self.printed = SimpleNamespace(remote=self._printed)

    def _printed(self, key: str, printed: Printed) -> Any:
        self.told.append((key, printed))
        self.answers.append(Future())
        self.answers[-1].set_result(None)
        return SimpleNamespace(future=lambda: self.answers[-1])


@pytest.fixture
def hub(log: int, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    monkeypatch.setattr(output_tail, "Output", lambda: _OneStream(OutputTail(log, "stderr")))
    return _Hub()


class _OneStream:
    def __init__(self, tail: OutputTail) -> None:
        self._tail = tail

    def read(self, **how: bool) -> list[PrintedLine]:
        return list(self._tail.read(**how))


def test_the_hub_knows_what_work_has_printed_before_anybody_has_its_outcome(
    hub: _Hub, log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_tail, "LOOK_S", 1000.0)
    teller = Teller(hub)
    with teller.working("images"):
        os.write(log, b"a warning\n" * (SAME + 4))
    (key, printed) = hub.told.pop()
    warning = PrintedLine("stderr", "a warning")
    assert (key, printed.lines, printed.more) == ("images", (warning,) * SAME, {warning: 4})
    with teller.working("images"):
        pass
    assert hub.told == []  # it costs nothing where nobody prints

    def fails() -> None:
        with teller.working("images"):
            os.write(log, b"its last words")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fails()
    assert hub.told.pop()[1].lines == (PrintedLine("stderr", "its last words"),)


def test_the_hub_hears_of_work_that_takes_long(hub: _Hub, log: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_tail, "LOOK_S", 0.01)
    with Teller(hub).working("images"):
        os.write(log, b"this sample is large")
        eventually(
            lambda: [printed.lines for _, printed in hub.told] == [(PrintedLine("stderr", "this sample is large"),)]
        )
