"""What is read of a run directory, damaged or not."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.report import run_tail
from offload.report.json_values import number, text
from offload.report.page.records import COLUMNS, RunReader, read_run
from offload.report.run_tail import Tails, tails_in
from tests.report.runs import Writer, plain


def test_intervals_events_and_metrics_become_columns(tmp_path: Path) -> None:
    run = read_run(plain(tmp_path / "run", intervals=12))
    assert len(run.intervals) == 12
    assert set(run.intervals.columns) == set(COLUMNS)
    assert np.isfinite(run.intervals["samples_per_s"]).all()
    assert set(run.intervals.cores) == {"ml.g5.xlarge", "ml.c5.4xlarge"}
    assert [event.kind for event in run.events][:1] == ["run_started"]
    assert run.summary["status"] == "finished"
    assert run.notes == ()


def test_a_line_that_a_crash_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", intervals=5)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"at": 17')
    run = read_run(path)
    assert len(run.intervals) == 5
    assert run.notes == ("The last line of metrics.jsonl is incomplete, as a crash leaves it. This report omits it.",)


def test_damaged_lines_in_the_middle_are_counted(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", intervals=5)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    deep = "[" * 100_000
    bad = [
        "\x00\x00",
        "null",
        "[1]",
        '{"at": "now"}',
        '{"at": NaN}',
        '{"at": 1e400}',
        deep,
        '{"at": ' + "9" * 500 + "}",
    ]
    (path / "metrics.jsonl").write_text("\n".join([*lines[:2], *bad, *lines[2:]]) + "\n")
    (path / "events.jsonl").write_bytes(
        (path / "events.jsonl").read_bytes() + b"\xff\xfe\n" + b'{"event": 3, "at": 1}\n'
    )
    run = read_run(path)
    assert len(run.intervals) == 5
    assert run.notes[1] == f"metrics.jsonl: {len(bad)} damaged lines (3, 4, 5, 6, 7, …). This report omits them."
    assert "events.jsonl: 2 damaged lines" in run.notes[0]


@pytest.mark.parametrize("content", ["", "[]", "{", "3", '"x"'])
def test_a_damaged_summary_is_told(tmp_path: Path, content: str) -> None:
    path = plain(tmp_path / "run", intervals=3)
    (path / "summary.json").write_text(content)
    run = read_run(path)
    assert run.summary == {}
    assert len(run.notes) == (1 if content else 0)


@pytest.mark.parametrize("field", ["metrics", "preprocessing", "samples_per_s", "workers"])
@pytest.mark.parametrize("value", [None, 3, "x", [1], {"a": "b"}, {"a": {"cores": "x"}}, True])
def test_fields_of_another_kind_are_unknown(tmp_path: Path, field: str, value: object) -> None:
    run = Writer(tmp_path)
    run.train(2, **{field: value})
    assert len(read_run(tmp_path).intervals) == 2


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory. Name the folder of a run"):
        read_run(tmp_path / "none")
    with pytest.raises(
        ConfigError, match=r"is no run directory: it holds none of events.jsonl, metrics.jsonl, summary.json"
    ):
        read_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no run directory but a file"):
        read_run(tmp_path / "file")
    with pytest.raises(ConfigError, match="a path holds no such character"):
        read_run(Path("a\0b"))


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match=r"events.jsonl is no ordinary file"):
        read_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics.jsonl is no ordinary file"):
        read_run(tmp_path)


def test_numbers_and_texts() -> None:
    assert number(3) == 3.0
    for other in (None, True, "3", [3], 10**400, float("inf"), 1e300):
        assert np.isnan(number(other))
    assert text(None) == ""
    assert text({"a": 1}) == json.dumps({"a": 1})
    assert len(text("x" * 5000)) == 2000


def grown(path: Path, into: Path, sizes: dict[str, int]) -> None:
    """The beginnings of a run's files, of these sizes."""
    into.mkdir(exist_ok=True)
    for name, size in sizes.items():
        with open(into / name, "ab") as file:
            file.write((path / name).read_bytes()[file.tell() : size])


@given(cuts=st.lists(st.floats(0, 1), max_size=6))
@settings(max_examples=25)
def test_a_run_read_while_it_grows_is_the_run_read_afterwards(
    tmp_path_factory: pytest.TempPathFactory, grows: Path, cuts: list[float]
) -> None:
    into = tmp_path_factory.mktemp("grows") / "run"
    taken: Counter[str] = Counter()

    def look(offsets: Mapping[str, int]) -> Tails:
        tails = tails_in(into)(offsets)
        taken.update({name: len(tail.data) for name, tail in tails.items()})
        return tails

    reader = RunReader(into, look)
    names = ("events.jsonl", "metrics.jsonl")
    for cut in [*sorted(cuts), 1.0]:
        grown(grows, into, {name: round(cut * (grows / name).stat().st_size) for name in names})
        run = reader.read()
    whole = read_run(into)
    assert (run.events, run.notes) == (whole.events, whole.notes)
    for name in COLUMNS:
        np.testing.assert_array_equal(run.intervals[name], whole.intervals[name])
    assert dict(taken) == {name: (grows / name).stat().st_size for name in names}, "no byte is read twice"


@pytest.fixture(scope="module")
def grows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("whole") / "run", intervals=5)


def test_a_run_that_takes_the_directory_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", intervals=9)
    reader = RunReader(path)
    assert len(reader.read().intervals) == 9
    shutil.rmtree(path)
    plain(path, intervals=4)
    assert len(reader.read().intervals) == 4


def test_a_file_larger_than_one_look_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tail, "MOST_BYTES", 1000)  # less than a line
    path = plain(tmp_path / "run", intervals=7)
    assert (len(read_run(path).intervals), read_run(path).notes) == (7, ())
