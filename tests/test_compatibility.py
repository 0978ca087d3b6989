"""The matrix of versions: which rows and programs run, how results merge, what ends a program, and the page of the record."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from benchmarks import compatibility
from benchmarks.matrix import environments, running
from benchmarks.matrix.environments import Environment, EnvironmentFailed, PythonMissing
from benchmarks.matrix.rows import PROGRAMS, REFUSAL, ROWS, UnknownName, chosen_programs, chosen_rows
from benchmarks.matrix.running import Outcome
from offload.versions import LOWEST_RAY, PYTHONS, TESTED_RAY
from tests.helpers import ROOT
from tests.programs import compatibility_page

VERSIONS = {"python": "3.11.7", "ray": "2.50.1", "torch": "2.15.0"}
ENVIRONMENT = Environment(python=Path("bin/python"), versions=VERSIONS)


def named(name: str) -> Any:
    return chosen_rows([name])[0]


# --- rows and programs ------------------------------------------------------------------------------------------------


def test_each_minor_version_of_the_window_has_a_row_and_its_neighbours_are_refused() -> None:
    works = [row.name for row in ROWS if row.expects == "works"]
    lowest, limit = (int(version.split(".")[1]) for version in TESTED_RAY)
    assert [name for name in works if name.startswith("ray")] == [f"ray2.{minor}" for minor in range(lowest, limit)]
    of_python = {row.python for row in ROWS if row.expects == "works"}
    assert of_python == {f"3.{minor}" for minor in range(PYTHONS[0][1], PYTHONS[1][1])}
    assert [row.name for row in ROWS if row.expects == "refused"] == [
        f"ray2.{lowest - 1}",
        f"python3.{PYTHONS[0][1] - 1}",
    ]
    assert f"2.{lowest}" == LOWEST_RAY


def test_rows_and_programs_come_in_their_own_order_and_all_without_a_choice() -> None:
    assert chosen_rows([]) == list(ROWS)
    assert [row.name for row in chosen_rows(["newest", "ray2.50"])] == ["ray2.50", "newest"]
    assert chosen_programs([]) == list(PROGRAMS)
    assert chosen_programs(["job", "dataloader"]) == ["dataloader", "job"]


@pytest.mark.parametrize(
    ("choose", "known"), [(chosen_rows, "ray2.50, ray2.51"), (chosen_programs, "dataloader, trainer")]
)
def test_an_unknown_name_is_answered_with_the_known_ones(choose: Any, known: str) -> None:
    with pytest.raises(UnknownName, match=rf"there is no \w+ ray1\.0; the \w+s are {known}"):
        choose(["ray1.0"])


def test_a_bad_row_on_the_command_line_names_the_rows() -> None:
    done = CliRunner().invoke(compatibility.main, ["--only", "ray1.0"])
    assert done.exit_code == 2
    assert all(row.name in done.output for row in ROWS)


def test_every_program_is_there() -> None:
    folder = ROOT / "benchmarks" / "matrix" / "programs"
    assert {path.stem for path in folder.glob("*.py")} == {*PROGRAMS, "common", "__init__"}


# --- merging ----------------------------------------------------------------------------------------------------------


def entry(**programs: bool) -> dict[str, Any]:
    return {
        "expects": "works",
        "versions": VERSIONS,
        "programs": {name: {"passed": ok} for name, ok in programs.items()},
    }


def test_a_row_replaces_its_own_part_of_the_result() -> None:
    known = {"newest": entry(trainer=True), "ray2.50": entry(trainer=False, job=True)}
    merged = compatibility.merged(known, named("ray2.50"), entry(trainer=True, dataloader=True))
    assert list(merged) == ["ray2.50", "newest"]  # the order of the rows
    assert merged["newest"] == known["newest"]
    assert list(merged["ray2.50"]["programs"].items()) == [  # the order of the programs
        ("dataloader", {"passed": True}), ("trainer", {"passed": True}), ("job", {"passed": True}),
    ]  # fmt: skip


def test_outcomes_with_other_versions_are_dropped() -> None:
    known = {"ray2.50": {**entry(job=True), "versions": {**VERSIONS, "ray": "2.50.0"}}}
    merged = compatibility.merged(known, named("ray2.50"), entry(trainer=True))
    assert set(merged["ray2.50"]["programs"]) == {"trainer"}


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Which programs pass, by name. No environment is made."""
    by_name = dict.fromkeys(PROGRAMS, True)
    monkeypatch.setattr(environments, "make", lambda row, folder: ENVIRONMENT)
    monkeypatch.setattr(
        running,
        "run",
        lambda environment, name: Outcome(passed=by_name[name], seconds=1.0, why="" if by_name[name] else "it fell"),
    )
    return by_name


def test_the_command_ends_with_1_if_a_program_fails_and_says_why(outcomes: dict[str, bool], tmp_path: Path) -> None:
    arguments = ["--only", "ray2.50", "--program", "kill", "--program", "job", "-o", str(tmp_path / "c.json")]
    done = CliRunner().invoke(compatibility.main, arguments)
    assert done.exit_code == 0, done.output
    outcomes["kill"] = False
    done = CliRunner().invoke(compatibility.main, arguments)
    assert done.exit_code == 1
    assert "ray2.50 kill: failed: it fell" in done.output
    row = json.loads((tmp_path / "c.json").read_text())["rows"]["ray2.50"]
    assert row["programs"]["kill"] == {"passed": False, "seconds": 1.0, "why": "it fell"}
    assert row["versions"] == VERSIONS
    assert {"machine", "command"} < row.keys()


@pytest.mark.parametrize(("reason", "code"), [(PythonMissing("no Python 3.14"), 0), (EnvironmentFailed("no wheel"), 1)])
def test_an_environment_that_cannot_be_made_is_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: EnvironmentFailed, code: int
) -> None:
    def fail(*unused: object) -> Environment:
        raise reason

    monkeypatch.setattr(environments, "make", fail)
    output = tmp_path / "c.json"
    done = CliRunner().invoke(compatibility.main, ["--only", "python3.14", "--json", "-o", str(output)])
    assert done.exit_code == code
    (row,) = json.loads(output.read_text())["rows"].values()
    assert (row["why"], row["programs"]) == (str(reason), {})
    assert json.loads(done.stdout) == {"python3.14": {k: v for k, v in row.items() if k not in ("machine", "command")}}


def test_another_benchmarks_result_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"benchmark": "peers", "rows": {}}')
    done = CliRunner().invoke(compatibility.main, ["--only", "ray2.50", "-o", str(path)])
    assert done.exit_code == 2
    assert "is no result of this benchmark" in done.output
    assert path.read_text() == '{"benchmark": "peers", "rows": {}}'


# --- running ----------------------------------------------------------------------------------------------------------

HERE = Environment(python=Path(sys.executable), versions=VERSIONS, refused_by="the installer's words")
LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(child.pid, flush=True)
"""


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_what_a_program_leaves_behind_is_ended_and_nothing_else() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with subprocess.Popen(sleeper, env={**os.environ, running.MARK: "another"}) as bystander:
        done = running._run(HERE, ["-c", LEAVES_A_CHILD], 300.0)
        assert done.code == 0
        assert not lives(int(done.stdout))
        assert lives(bystander.pid)
        bystander.kill()


def test_a_program_that_does_not_end_is_ended() -> None:
    done = running._run(HERE, ["-c", "import time; time.sleep(1000)"], 1.0)
    assert done.code is None


@pytest.mark.parametrize(
    ("imported", "command", "passed"),
    [
        ((1, "Traceback\noffload.errors.VersionError: Ray is old.\n"), (2, "offload: Ray is old.\n"), True),
        ((1, "Traceback\noffload.errors.VersionError: Ray is old.\n"), (2, "Traceback\noffload: Ray is old.\n"), False),
        ((1, "ModuleNotFoundError: No module named 'ray'\n"), (2, "offload: Ray is old.\n"), False),
        ((0, ""), (0, ""), False),
    ],
)
def test_a_refusal_is_one_sentence_at_the_import_and_by_the_command(
    monkeypatch: pytest.MonkeyPatch, imported: tuple[int, str], command: tuple[int, str], passed: bool
) -> None:
    answers = iter([imported, command])

    def answer(*unused: object) -> Any:
        code, stderr = next(answers)
        return running._Done(code=code, stdout="", stderr=stderr, seconds=1.0)

    monkeypatch.setattr(running, "_run", answer)
    outcome = running.refusal(HERE)
    assert outcome.passed == passed
    if passed:
        assert outcome.found == {"import": "Ray is old.", "installer": "the installer's words"}


def test_the_result_holds_no_folders_of_this_machine() -> None:
    why = "exit code 1: Traceback\n  File x\nImportError: cannot import name 'a' from 'b' (/somewhere/lib/python3/b.py)\n\n"
    document = Outcome(passed=False, seconds=1.0, why=why).document()
    assert document["why"] == "exit code 1: ImportError: cannot import name 'a' from 'b' (b.py)"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_agrees_with_the_record() -> None:
    page = compatibility_page.written(compatibility_page.recorded())
    assert compatibility_page.PAGE.read_text(encoding="utf-8") == page, "run make map"


def test_the_page_tells_what_failed_and_what_is_missing() -> None:
    machine = {"cores": 2, "cpu_model": "CPU"}
    rows = {
        "ray2.50": {**entry(dataloader=True, kill=False), "machine": machine},
        "python3.14": {**entry(), "why": "there is no Python 3.14 here", "machine": machine},
        "ray2.49": {
            **entry(), "expects": "refused", "machine": machine,
            "programs": {REFUSAL: {"passed": True, "found": {"import": "Ray 2.49.2 is old.", "installer": ""}}},
        },
    }  # fmt: skip
    page = compatibility_page.written(rows)
    assert "| ray2.50 | 3.11.7 | 2.50.1 | 2.15.0 | ✓ | – | – | **fails** | – | – | – |\n" in page
    assert "* `python3.14`: there is no Python 3.14 here.\n" in page
    assert "* `newest`: not tried yet.\n" in page
    assert "say: Ray 2.49.2 is old. The installer refuses it, too." in page
