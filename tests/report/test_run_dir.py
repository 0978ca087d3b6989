"""What a run leaves behind, and how people read it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError, OffloadError, RunError
from offload.report.bottleneck import verdict
from offload.report.events import ClusterChanged, CoreCountWanted, ReadyToResize, Resized, RunLeaving
from offload.report.run_dir import CHECKPOINTS, EVENTS, METRICS, SUMMARY, RunDirectory, read_lines, to_json
from offload.report.terminal.live_line import LiveLine, format_line
from offload.report.terminal.summary import format_summary, summary_rows
from tests.helpers import nobody, open_to_others
from tests.report.runs import write_event

OWN = {
    "summary.json",
    "events.jsonl",
    "metrics.jsonl",
    "skipped.jsonl",
    "printed.jsonl",
    "report.html",
    "checkpoints",
    "error.txt",
}


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "schema": "offload.summary/1",
        "status": "finished",
        "error": None,
        "samples": 12_800,
        "steps": 100,
        "step_count_all_ranks": 200,
        "epochs": 2,
        "wall_s": 3725.0,
        "samples_per_s": 1234.56,
        "step_time_s": 20.0,
        "data_wait_s": 4.0,
        "peer_wait_s": 1.0,
        "compute_s": 14.0,
        "sync_s": 1.0,
        "stall": 0.2,
        "first_batch_s": 3.21,
        "workers": 2,
        "local_batch_size": 32,
        "accum_steps": 1,
        "global_batch_size": 128,
        "preprocessing_cores": 6,
        "device": "GPU",
        "input": {
            "train": {
                "core_seconds_per_sample": 0.004,
                "wire_bytes_per_sample": 150_528.0,
                "input_ceiling_samples_per_s": 1500.0,
            },
            "val": {},
        },
        "skipped": 0,
        "metrics": {"loss": 0.123456},
        "checkpoint": None,
        "run_dir": "runs/quickstart",
        "versions": {"python": "3.11", "ray": "2.60"},
        **changes,
    }


def interval(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "at": 1_800_000_000.0 + step,
        "epoch": 2,
        "step": step,
        "samples_per_s": 2710.4,
        "stall": 0.034,
        "input_ceiling_samples_per_s": 2950.0,
        "device_ceiling_samples_per_s": 2800.0,
        "device": "GPU",
        "step_time_s": 1.0,
        "data_wait_s": 0.03,
        "peer_wait_s": 0.01,
        "compute_s": 0.9,
        "sync_s": 0.06,
        "workers": 4,
        "local_batch_size": 64,
        "accum_steps": 0,
        "metrics": {"loss": 2.3149},
        **changes,
    }


def finished(path: Path, **changes: Any) -> RunDirectory:
    directory = RunDirectory(path)
    write_event(directory.path, "run_started", samples=10)
    directory.metrics(interval(1))
    directory.skipped({"sample_id": 3, "reason": "corrupt"})
    directory.printed({"at": 1.0, "stream": "stderr", "text": "a warning"})
    write_event(directory.path, "run_finished", status="finished")
    directory.summary(summary(**changes))
    directory.write("report.html", "<html>")
    directory.write("error.txt", "none")
    (path / CHECKPOINTS / "step-1").mkdir(parents=True)
    return directory


# --- the directory ----------------------------------------------------------------------------------------------------


def test_a_new_directory_is_made_and_holds_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "a")
    assert not directory.resuming
    assert list(directory.path.iterdir()) == []


def test_events_and_metrics_append_in_order(tmp_path: Path) -> None:
    directory = finished(tmp_path)
    assert [line["event"] for line in read_lines(tmp_path / EVENTS)] == ["run_started", "run_finished"]
    directory.event(RunLeaving(at=5.0, nodes=["10.0.0.1"]))
    assert read_lines(tmp_path / EVENTS)[-1] == {"event": "run_leaving", "at": 5.0, "nodes": ["10.0.0.1"]}
    assert read_lines(tmp_path / METRICS) == [interval(1)]
    assert {p.name for p in tmp_path.iterdir()} == OWN  # no temporary files


def test_an_unfinished_run_is_resumed(tmp_path: Path) -> None:
    for status in (None, "interrupted", "failed"):
        first = RunDirectory(tmp_path / str(status))
        write_event(first.path, "run_started")
        if status:
            first.summary(summary(status=status))
        again = RunDirectory(first.path)
        assert again.resuming
        write_event(again.path, "run_started")
        assert len(read_lines(first.path / EVENTS)) == 2


def test_the_newest_step_that_was_certainly_stored(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    expected: list[tuple[str, dict[str, Any], int | None]] = [
        ("run_started", {}, None),
        ("checkpoint", {"step": 3, "waited": False}, None),  # it may never have been whole
        ("checkpoint", {"step": 5, "waited": False}, 3),  # the one before was, or this would not have been begun
        ("worker_lost", {}, 3),
        ("checkpoint", {"step": 4, "waited": False}, 3),
        ("checkpoint", {"step": 6, "waited": True}, 6),
        ("run_resumed", {}, 6),
        ("resumed", {"step": 6}, 6),
        ("checkpoint", {"step": 9, "waited": False}, 6),
    ]
    for kind, values, committed in expected:
        write_event(directory.path, kind, **values)
        assert directory.committed_step() == committed, (kind, values)


def test_a_finished_run_is_refused(tmp_path: Path) -> None:
    finished(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(ConfigError, match=r"holds a finished run\. Pass overwrite=True .* another run_dir") as e:
        RunDirectory(tmp_path)
    assert e.value.exit_code == 2
    assert str(tmp_path) in str(e.value)
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_overwriting_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    for name in ("profile.json", "plan.json", "notes.txt", "models/best.pt", "tensorboard/layout.txt"):
        path = tmp_path / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("the user's")
    (tmp_path / "run/tensorboard/events.out.tfevents.1.host").write_text("of the old run")
    directory = RunDirectory(tmp_path / "run", overwrite=True)
    assert not directory.resuming
    assert (directory.path / SUMMARY).exists()  # whatever else is wrong with the call, the old run is still there
    directory.begin()
    kept = {"profile.json", "plan.json", "notes.txt", "models", "tensorboard"}
    assert {p.name for p in directory.path.iterdir()} == kept
    assert [p.name for p in (directory.path / "tensorboard").iterdir()] == ["layout.txt"]
    assert (tmp_path / "run/models/best.pt").read_text() == "the user's"


def test_overwriting_does_not_follow_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    (elsewhere / "precious.pt").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHECKPOINTS).symlink_to(elsewhere)
    (tmp_path / "run" / EVENTS).write_text("")
    RunDirectory(tmp_path / "run", overwrite=True).begin()
    assert (elsewhere / "precious.pt").exists()
    assert not (tmp_path / "run" / CHECKPOINTS).exists()


def test_overwriting_also_starts_anew_where_a_run_was_unfinished(tmp_path: Path) -> None:
    write_event(RunDirectory(tmp_path).path, "run_started")
    assert not RunDirectory(tmp_path, overwrite=True).resuming


def test_a_folder_where_nothing_ran_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / CHECKPOINTS / "mine.pt").write_text("")
    RunDirectory(tmp_path, overwrite=True).begin()
    assert (tmp_path / CHECKPOINTS / "mine.pt").exists()


@pytest.mark.parametrize("broken", ["", "{", "[]", '"finished"', "\xff"])
def test_a_summary_that_is_none_does_not_count_as_finished(tmp_path: Path, broken: str) -> None:
    (tmp_path / SUMMARY).write_text(broken, encoding="latin-1")
    RunDirectory(tmp_path)


def test_a_home_directory_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(Path("~/a")).path == tmp_path / "a"
    with pytest.raises(ConfigError, match=r"nobody knows the home folder ~nobody-of-this-name"):
        RunDirectory(Path("~nobody-of-this-name/a"))
    assert RunDirectory(Path("b")).path == tmp_path / "b"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to the run directory .*run: File exists"):
        RunDirectory(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights, which only root can")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    def as_nobody(path: Path) -> str:
        with nobody():
            try:
                RunDirectory(path).event(ReadyToResize(step=1))
                return "written"
            except OffloadError as error:
                return f"{type(error).__name__} {error}"

    open_to_others(tmp_path)
    (tmp_path / "free").mkdir()
    (tmp_path / "free").chmod(0o777)
    assert as_nobody(tmp_path / "free" / "run") == "written"
    for path in (tmp_path, tmp_path / "new" / "run"):
        text = as_nobody(path)
        assert text.startswith(f"ConfigError cannot write to the run directory {path}: Permission denied.")
        assert "run_dir" in text
    (tmp_path / "free" / "run" / EVENTS).chmod(0o644)
    os.chown(tmp_path / "free" / "run" / EVENTS, 0, 0)  # an earlier run by root, in a directory of one's own
    assert as_nobody(tmp_path / "free" / "run").startswith("ConfigError cannot write to the run directory")


def test_a_disk_that_fills_up_later(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / EVENTS).mkdir()  # whatever keeps it from being written
    with pytest.raises(RunError, match=r"cannot write to the run directory .*the same command resumes"):
        directory.event(ReadyToResize(step=1))
    with pytest.raises(RunError, match="cannot write"):
        directory.write("missing/part", "")


def test_a_text_with_a_file_name_that_is_not_unicode(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    RunDirectory(tmp_path).write("error.txt", f"größe: cannot read {name}\n")
    assert (tmp_path / "error.txt").read_text(encoding="utf-8") == "größe: cannot read caf\\udce9.jpg\n"


# --- the files --------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
)


def refuse_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@settings(deadline=None)
@given(document=values)
def test_json_has_no_nan_and_no_infinity(document: Any) -> None:
    text = to_json(document)
    assert "\n" not in text  # one line of a .jsonl file, whatever is in it
    json.loads(text, parse_constant=refuse_constant)


def test_what_is_not_finite_becomes_null_and_the_rest_stays() -> None:
    document = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": (1, {"d": math.nan}), 5: True}
    assert json.loads(to_json(document)) == {"a": None, "b": [None, None, 1.5], "c": [1, {"d": None}], "5": True}


def test_numbers_of_numpy_are_numbers() -> None:
    document = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("nan"), "d": np.array(2), "e": Path("x")}
    assert json.loads(to_json(document)) == {"a": 0.5, "b": 3, "c": None, "d": 2, "e": "x"}


def test_a_line_cut_off_by_a_crash(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_event(directory.path, "run_started")
    write_event(directory.path, "step", note="é\n")
    whole = (tmp_path / EVENTS).read_bytes()
    for cut in range(1, len(whole)):
        (tmp_path / EVENTS).write_bytes(whole[:cut])
        before = read_lines(tmp_path / EVENTS)
        assert [e["event"] for e in before] == ["run_started", "step"][: len(before)]
        # The resumed run's own first line must not be glued to the rest.
        again = RunDirectory(tmp_path)
        again.begin()
        write_event(again.path, "run_started", resumed=True)
        assert read_lines(tmp_path / EVENTS)[:-1] == before
        assert read_lines(tmp_path / EVENTS)[-1]["resumed"] is True


def test_a_run_with_damaged_events_resumes_from_the_others(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_event(directory.path, "checkpoint", step=7)
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b"null\n[1]\n\xff\xfe\n\x00\x00\n")
    write_event(directory.path, "late")
    assert [event["event"] for event in read_lines(tmp_path / EVENTS)] == ["checkpoint", "late"]
    assert directory.committed_step() == 7


def test_no_file_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "nothing.jsonl") == []


# --- the summary ------------------------------------------------------------------------------------------------------


def test_the_summary_of_a_finished_run() -> None:
    rows = dict(summary_rows(summary(checkpoint="s3://bucket/c", skipped=1234)))
    assert rows == {
        "status": "finished",
        "trained": "12,800 samples in 100 steps, 2 epochs",
        "wall time": "1 h 2 min",
        "throughput": "1,234.6 samples/s while stepping",
        "workers × local batch × micro-batches": "2 × 32 × 2 = 128 on GPU",
        "stall": "20.0% of step time waiting for data",
        "a step": "data wait 20.0 ms  peer wait 5.0 ms  compute 70.0 ms  sync 5.0 ms",
        "preprocessing of train": "4.00 core-ms and 150.5 kB a sample; 6 cores: at most 1,500 samples/s",
        "first batch after": "3.2 s",
        "skipped samples": "1,234, listed in skipped.jsonl",
        "loss": "0.1235",
        "checkpoint": "s3://bucket/c",
        "run directory": "runs/quickstart",
    }
    text = format_summary(summary())
    assert "offload run" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert text.splitlines()[-1] == verdict(summary())
    assert "skipped" not in text


def test_the_summary_of_an_interrupted_run() -> None:
    assert dict(summary_rows(summary(status="interrupted")))["status"] == "interrupted; the same command resumes it"


def test_the_summary_of_a_failed_run() -> None:
    # Before the first step there is little to tell.
    nothing: dict[str, Any] = {
        "steps": 0,
        "samples": 0,
        "step_count_all_ranks": 1,
        "samples_per_s": 0.0,
        "stall": 0.0,
        "first_batch_s": None,
        "input": {},
        "metrics": {},
        "wall_s": 95.0,
    }
    document = summary(status="failed", error="the transform augment raised ValueError [x]", **nothing)
    rows = dict(summary_rows(document))
    assert rows["status"] == "failed: the transform augment raised ValueError [x]"
    assert rows["wall time"] == "95.0 s"
    assert "a step" not in rows
    text = format_summary(document)
    assert "raised ValueError [x]" in text  # not eaten as markup
    assert text.endswith("Nothing was trained.")


def test_the_summary_says_how_much_came_from_caches() -> None:
    rates = summary()["input"]["train"]
    read = {"train": {**rates, "cache_bytes": 75e9, "storage_bytes": 25e9}, "val": {}}
    rows = dict(summary_rows(summary(input=read)))
    assert rows["reading of train"] == "75% of 100 GB came from the nodes' caches"
    assert "reading of train" not in dict(summary_rows(summary()))


def test_the_verdict_names_what_bound_the_run() -> None:
    assert verdict(summary(stall=0.01)) == "The GPU was the bottleneck: more CPUs would not speed this up."
    text = verdict(summary(stall=0.75))
    assert "Preprocessing was the bottleneck for 75% of the time" in text
    assert "up to 4.0 times this rate" in text
    assert "times this rate" in verdict(summary(stall=1.0))
    rates = summary()["input"]["train"]
    text = verdict(summary(stall=0.75, input={"train": {**rates, "blocked": 0.8}, "val": {}}))
    assert "Reading was the bottleneck for 75% of the time: preprocessing waited 80% of its time for files" in text
    assert verdict(summary(stall=0.75, input={"train": {**rates, "blocked": 0.2}})).startswith("Preprocessing was")


# --- the live line ----------------------------------------------------------------------------------------------------


def test_the_live_line() -> None:
    line = format_line(interval(1200, metrics={"loss": 2.3149, "note": "text"}, workers=4))
    assert line == (
        "epoch 3  step 1,200  loss 2.315 | 2,710 samples/s (input 2,950, GPU 2,800) | stall 3% | 4 workers × 64 × 1"
    )
    assert line.replace("2.315", "2.31") in (format_line.__doc__ or "")


def test_slow_rates_are_not_rounded_to_nothing() -> None:
    slow = {"samples_per_s": 0.42, "input_ceiling_samples_per_s": 0.45, "device_ceiling_samples_per_s": 9.6}
    assert "| 0.42 samples/s (input 0.45, GPU 9.6) |" in format_line(interval(5, **slow))
    rates = {"core_seconds_per_sample": 2.4, "wire_bytes_per_sample": 1e6, "input_ceiling_samples_per_s": 0.42}
    rows = dict(summary_rows(summary(input={"train": rates}, preprocessing_cores=1)))
    assert rows["preprocessing of train"].endswith("1 core: at most 0.42 samples/s")
    wanted = CoreCountWanted(cores=8, before=4, device_samples_per_s=2.6, core_samples_per_s=0.4)
    assert "could train 2.6 samples/s, and a core delivers 0.4" in wanted.sentence({})


def test_one_worker_trains_and_two_train() -> None:
    assert Resized(workers=1, workers_before=2).sentence({}) == "1 worker trains, 2 before"
    assert Resized(workers=2, workers_before=1).sentence({}) == "2 workers train, 1 before"
    changed = ClusterChanged(left=[], leaving=["10.0.0.7"], joined=[], workers=1, preprocessing_cores=1)
    assert changed.sentence({}) == "the cluster changed (leaving 10.0.0.7): 1 core preprocesses"


def test_goodput_is_shown_where_it_is_another_number() -> None:
    assert format_line(interval(5, samples_per_s=2_710.0, goodput=2_240.4)).endswith(
        "4 workers × 64 × 1 | goodput 2,240"
    )
    assert "goodput" not in format_line(interval(5, samples_per_s=2_710.0, goodput=2_710.0))
    assert dict(summary_rows(summary(samples_per_s=1_234.6, goodput=1_000.0)))["goodput"].startswith(
        "1,000.0 samples/s"
    )
    assert "goodput" not in dict(summary_rows(summary(samples_per_s=1_234.6, goodput=1_234.6)))


def test_the_live_line_before_ceilings_are_known() -> None:
    unknown: dict[str, Any] = {"input_ceiling_samples_per_s": None, "device_ceiling_samples_per_s": None, "metrics": {}}
    line = format_line(interval(5, workers=1, accum_steps=3, **unknown))
    assert line == "epoch 3  step 5 | 2,710 samples/s | stall 3% | 1 worker × 64 × 4"


def test_on_no_terminal_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [100.0]
    monkeypatch.setattr("offload.report.terminal.live_line.time.monotonic", lambda: at[0])
    with LiveLine() as live:
        live.status("starting [workers]")
        for step in range(25):
            live.update(interval(step))
            at[0] += 1.0
        live.note("resize [4 → 2]")
        live.printed("loss\n[falls]", rank=0)
        live.printed("x", stream="stderr", rank=1)
    out, lines = capsys.readouterr()
    assert out == "loss\n[falls]\n"  # what the program prints, and its result
    assert [line.split(" | ")[0] for line in lines.splitlines()] == [
        "starting [workers]",
        "epoch 3  step 0  loss 2.315",
        "epoch 3  step 10  loss 2.315",
        "epoch 3  step 20  loss 2.315",
        "resize [4 → 2]",
        "[rank 1] x",
    ]


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine(quiet=True) as live:
        live.update(interval(1))
        live.note("note")
    assert capsys.readouterr() == ("", "")
