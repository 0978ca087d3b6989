"""``offload report`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offload.cli.main import main
from tests.report.runs import Writer, eventful, gpu_node, plain


def numbers(*args: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of --json, which takes a process of its own: it turns stdout aside for good."""
    command = [sys.executable, "-m", "offload", "report", *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    return done.returncode, json.loads(done.stdout)


def report(*args: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, args)], catch_exceptions=False)


def test_a_page_in_the_run_directory_and_the_verdict_on_the_terminal(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", core_seconds=0.2, intervals=30)
    done = report(path)
    assert done.exit_code == 0
    assert done.stdout.startswith("Preprocessing was the bottleneck for ")
    assert "Next: " in done.stdout
    assert "alone would train" in done.stdout
    assert done.stdout.endswith(f"report: {path / 'report.html'}\n")
    assert "<!doctype html>" in (path / "report.html").read_text(encoding="utf-8")


def test_several_runs_as_one_page_and_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        plain(tmp_path / name / "run", intervals=30, core_seconds=0.1 if name == "a" else 0.05)
    code, document = numbers("a/run", "b/run", "c/run")
    assert code == 0
    assert document["schema"] == "offload.report/1"
    assert document["report"] == "offload-report.html"
    assert [run["name"] for run in document["runs"]] == ["a/run", "b/run", "c/run"]
    assert document["runs"][1]["speed_up"]["low"] > 1.5
    assert (tmp_path / "offload-report.html").exists()


def test_a_page_elsewhere_and_pictures(tmp_path: Path) -> None:
    path = eventful(tmp_path / "run")
    before = sorted(path.iterdir())
    code, document = numbers(path, "-o", tmp_path / "page.html", "--png", tmp_path / "png")
    assert code == 0
    assert sorted(path.iterdir()) == before
    assert (tmp_path / "page.html").exists()
    written = document["pictures"]
    assert str(tmp_path / "png" / "throughput.png") in written
    assert all(Path(each).exists() for each in written)


def test_prices_of_ones_own(tmp_path: Path) -> None:
    run = Writer(tmp_path / "run")
    run.nodes = [gpu_node(instance_type="my.box")]
    run.begin()
    run.train(5)
    run.end()
    assert numbers(run.path)[1]["runs"][0]["usd"] is None
    priced = numbers(run.path, "--usd-per-hour", "my.box=3.6")[1]["runs"][0]
    assert priced["usd_per_hour"] == pytest.approx(3.6)
    catalog = tmp_path / "mine.toml"
    catalog.write_text(
        '[nodes."my.box"]\nvcpus = 4\nmemory_gib = 16\ngpus = 1\nnetwork_gbps = 10\nusd_per_hour = 7.2\n'
    )
    priced = numbers(run.path, "--catalog", catalog)[1]["runs"][0]
    assert priced["usd_per_hour"] == pytest.approx(7.2)
    # A type of the built-in catalog, whose price the run has written down, takes the price of the file, too.
    catalog.write_text(catalog.read_text().replace("my.box", "ml.g5.xlarge"))
    path = plain(tmp_path / "sold", intervals=5)
    assert numbers(path)[1]["runs"][0]["usd_per_hour"] == pytest.approx(1.408 + 0.816)
    assert numbers(path, "--catalog", catalog)[1]["runs"][0]["usd_per_hour"] == pytest.approx(7.2 + 0.816)


def test_a_run_that_failed_says_so_first(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", intervals=30)
    lines = (path / "events.jsonl").read_text().splitlines()
    ended = json.loads(lines[-1])
    assert ended["event"] == "run_finished"
    lines[-1] = json.dumps({**ended, "status": "failed", "error": "no such colour"})
    (path / "events.jsonl").write_text("\n".join([*lines, ""]))
    assert report(path).stdout.startswith("The run failed: no such colour.\n")
    code, document = numbers(path)
    assert code == 0
    assert (document["runs"][0]["status"], document["runs"][0]["error"]) == ("failed", "no such colour")


def test_a_damaged_run_has_a_page_with_a_note(tmp_path: Path) -> None:
    path = plain(tmp_path / "run", intervals=30)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"at": 17')
    done = report(path)
    assert done.exit_code == 0
    assert done.stdout.startswith("The last line of metrics.jsonl is incomplete, as a crash leaves it.")
    assert "The last line of metrics.jsonl is incomplete" in (path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Missing argument 'RUN_DIR...'"),
        (["none"], "none cannot be read: No such file or directory. Name the folder of a run"),
        (["~nobody-of-this-name/run"], "nobody knows the home folder ~nobody-of-this-name. Write its path in full."),
        (["file"], "file is no run directory but a file."),
        (["."], "is no run directory: it holds none of events.jsonl, metrics.jsonl, summary.json."),
        (["run", "none"], "none cannot be read"),
        (["run", "./run"], "the run directory run is given twice. Name each run once."),
        (["run", "-o", "missing/page.html"], "cannot be written to missing/page.html: No such file or directory."),
        (["run", "-o", "run"], "the report cannot be written to run: Is a directory. Choose another place with -o."),
        (["run", "--png", "file"], "the pictures cannot be written to file: File exists. Choose another --png."),
        (["run", "--catalog", "none.toml"], "the catalog none.toml cannot be read"),
        (["run", "--usd-per-hour", "3"], "'3' is no price: expected a name and dollars per hour"),
        (["run", "--usd-per-hour", "a=free"], "'a=free' is no price"),
        (["run", "--usd-per-hour", "a=nan"], "'a=nan' is no price"),
        (["run", "--usd-per-hour", "a=-1"], "'a=-1' is no price"),
    ],
)
def test_bad_input_ends_in_a_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plain(tmp_path / "run", intervals=2)
    (tmp_path / "file").touch()
    # "." is the folder that holds run/, not a run itself.
    done = report(*args)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


def test_an_error_is_a_document_too(tmp_path: Path) -> None:
    code, document = numbers(tmp_path / "none")
    assert code == 2
    assert document["schema"] == "offload.error/1"
