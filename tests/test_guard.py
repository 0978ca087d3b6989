"""The guard of the ratios that matter: what counts as worse, and what a user is told."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import guard, prediction
from benchmarks.guard import FIGURES, RECORD, Figure, judge
from tests.programs import evidence_page

ratios = st.lists(st.floats(0.2, 5.0), min_size=1, max_size=5)


@given(ratios, ratios, st.booleans(), st.floats(0.001, 0.3))
def test_worse_is_on_one_side_alone_and_more_noise_excuses_more(
    record: Sequence[float], values: Sequence[float], higher: bool, noise: float
) -> None:
    figure = Figure(says="a ratio", higher_is_better=higher)
    verdict = judge(record, values, figure, noise)
    before, now = statistics.median(record), statistics.median(values)
    if (now >= before) if higher else (now <= before):
        assert not verdict.worse
    if judge(record, values, figure, 2 * noise).worse:
        assert verdict.worse
    # The mirrored figure of the reciprocals is judged alike: a ratio and its inverse are one measurement.
    inverse = judge(
        [1 / v for v in record], [1 / v for v in values], Figure(says="", higher_is_better=not higher), noise
    )
    if len(record) % 2 and len(values) % 2:  # else a median is a mean, which is not that of the reciprocals
        assert inverse.worse == verdict.worse


def test_a_clear_loss_is_worse_and_a_small_one_is_noise() -> None:
    higher = Figure(says="rate", higher_is_better=True)
    assert judge([1.0, 1.01], [0.7, 0.71], higher, 0.03).worse
    assert not judge([1.0, 1.01], [0.97, 0.98], higher, 0.03).worse
    error = Figure(says="error", error=True)
    assert judge([0.0], [0.4], error, 0.05).worse
    assert not judge([0.0], [0.1], error, 0.05).worse


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """The figures that the only part of the guard measures."""
    values = {"delivered": [0.9, 0.9]}
    monkeypatch.setattr(guard, "measure_noise", lambda: 0.02)
    monkeypatch.setattr(guard, "PARTS", {"loader": lambda folder, repeats: values})
    return values


def run(*arguments: str) -> Any:
    return CliRunner().invoke(guard.main, [*arguments])


def test_the_guard_ends_with_1_where_a_ratio_is_worse(measured: dict[str, list[float]], tmp_path: Path) -> None:
    record = str(tmp_path / "guard.json")
    none = run("--against", record)
    assert none.exit_code == 2
    assert f"{record} is no record: make one on an idle machine with --record" in none.stderr
    assert run("--against", record, "--record").exit_code == 0
    assert run("--against", record).exit_code == 0
    measured["delivered"] = [0.5, 0.5]
    worse = run("--against", record, "--json")
    assert worse.exit_code == 1
    assert json.loads(worse.stdout)["verdicts"]["delivered"]["worse"]
    assert "worse than recorded, beyond the noise: delivered" in worse.stderr


def test_every_part_is_measured_unless_some_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guard, "measure_noise", lambda: 0.02)
    figures = dict(zip(guard.PARTS, FIGURES, strict=False))  # one for each part; which one does not matter here
    stubs = {part: lambda folder, repeats, name=name: {name: [1.0]} for part, name in figures.items()}
    monkeypatch.setattr(guard, "PARTS", stubs)
    for arguments, parts in (([], list(figures)), (["--only", "prediction"], ["prediction"])):
        record = tmp_path / f"{len(parts)}.json"
        assert run("--against", str(record), "--record", *arguments).exit_code == 0
        assert json.loads(record.read_text())["repeats"] == {figures[part]: [1.0] for part in parts}


def test_predictions_are_made_in_the_short_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def benchmark(program: str, *arguments: str) -> None:
        given = prediction.main.make_context(program, [*arguments]).params
        errors = [-0.02, 0.03, 0.01][: given["runs"]]
        given["output"].write_text(json.dumps({"cases": [{"error": error} for error in errors]}))

    monkeypatch.setattr(guard, "_benchmark", benchmark)
    assert guard.measure_prediction(tmp_path, 3) == {"prediction": [0.02, 0.03, 0.01]}


def test_a_benchmark_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guard, "measure_noise", lambda: 0.02)
    monkeypatch.setattr(guard, "PARTS", {"loader": lambda folder, repeats: guard._benchmark("no_such.py")})
    failed = run("--against", str(tmp_path / "guard.json"), "--record")
    assert failed.exit_code == 1
    assert "benchmarks/no_such.py ended with 2" in failed.stderr


def test_the_record_has_every_ratio() -> None:
    recorded = set(json.loads(RECORD.read_text(encoding="utf-8"))["repeats"])
    assert recorded == set(FIGURES)


def test_the_page_of_evidence_is_current() -> None:
    """Each claim's figure is in its record, and its picture and commands exist."""
    assert evidence_page.PAGE.read_text(encoding="utf-8") == evidence_page.written(), "make map writes it anew"
    for claim in evidence_page.CLAIMS:
        assert claim.figures or claim.remark, claim.says
        for command in claim.command.split(";") if claim.command else []:
            program = command.split()[1]
            assert (evidence_page.ROOT / program).exists(), program
        assert claim.picture is None or (RECORD.parent / claim.picture).exists(), claim.picture
