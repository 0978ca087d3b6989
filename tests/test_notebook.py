"""The tour runs in a real kernel, its cells' definitions reach other processes, and bad arguments are named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from offload import ConfigError, Trainer, notebook
from offload.model.planning.plans import Plan
from tests.helpers import ROOT, without_ray
from tests.model.test_profile import WHOLE
from tests.report.runs import plain

TOUR = ROOT / "examples" / "tour.ipynb"
DEADLINE_S = 800

EXECUTE = f"""
import sys, nbclient, nbformat
tour = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(tour, timeout={DEADLINE_S}).execute()
nbformat.write(tour, "executed.ipynb")
"""


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def shown(cell: Any, kind: str) -> str:
    """The cell's value in this form."""
    (value,) = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return str(value.get(kind, ""))


def test_the_tour_is_stored_without_outputs() -> None:
    nbformat.validate(nbformat.read(TOUR, 4))
    cells = code_cells(TOUR)
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)


@pytest.mark.soak
@pytest.mark.ray
def test_the_tour(tmp_path: Path) -> None:
    """Its data set, its transform and its loop exist in cells alone, so that a run of all its samples has sent them by value."""
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(TOUR)],
        cwd=tmp_path, env=without_ray(), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *_, probe, plan, run, report = code_cells(tmp_path / "executed.ipynb")
    assert "offload probe blurred squares" in shown(probe, "text/plain")
    assert "Squares" in shown(probe, "text/plain")
    assert "ml.g5.xlarge" in shown(plan, "text/html")
    assert shown(plan, "text/html").count("data:image/png") == 1
    printed = "".join(output.text for output in run.outputs)
    assert "3,072 samples in 48 steps" in printed
    assert "\x1b" not in printed  # no frames of an animation
    assert "tour: finished" in shown(report, "text/html")
    assert 'alt="Throughput' in shown(report, "text/html")
    summary = json.loads((tmp_path / "runs" / "tour" / "summary.json").read_text())
    assert (summary["samples"], set(summary["metrics"])) == (3 * 1024, {"loss", "accuracy"})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: notebook.probe(print), "trainer must be an offload.Trainer, found"),  # type: ignore[arg-type]
        (lambda: notebook.plan(7, gpu_types=["ml.g5.xlarge"]), "profile must be a result of probe\\(\\)"),  # type: ignore[arg-type]
        (lambda: notebook.plan("no.json", gpu_types=["ml.g5.xlarge"]), "the profile no.json"),
        (lambda: notebook.plan("no.json", gpu_types="ml.g5.xlarge"), "Pass \\['ml.g5.xlarge'\\]"),
        (lambda: notebook.report(), "needs the directory of a run"),
        (lambda: notebook.report("nowhere"), "the run directory .*nowhere cannot be read"),
    ],
    ids=["trainer", "profile", "no file", "types", "no run", "no such run"],
)
def test_bad_arguments_are_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize(("speed", "said"), [(0.005, "must be at least 0.01"), (200, "must be at most 100")])
def test_a_core_speed_that_no_profile_may_hold_is_refused_before_anything_is_measured(speed: float, said: str) -> None:
    trainer = Trainer(print, datasets={"train": [1, 2]}, batch_size=1)
    with pytest.raises(ConfigError, match=f"core_speed {said}"):
        notebook.probe(trainer, core_speed=speed)


def test_saved_documents_serve_the_commands(tmp_path: Path) -> None:
    profile = notebook.ProbeResult(document=WHOLE)
    profile.save(tmp_path / "profile.json")
    asked: Any = {"gpu_types": ["ml.g5.xlarge"], "cpu_types": ["ml.c5.4xlarge"], "cpu_nodes": (0, 4)}
    made = notebook.plan(profile, **asked)
    assert made.document == notebook.plan(tmp_path / "profile.json", **asked).document
    made.save(tmp_path / "plan.json")
    Plan.from_document(json.loads((tmp_path / "plan.json").read_text()), "the plan")
    with pytest.raises(ConfigError, match=r"nowhere/plan.json cannot be written: No such file"):
        made.save(tmp_path / "nowhere" / "plan.json")


def test_several_runs_are_compared_and_their_names_stay_text(tmp_path: Path) -> None:
    for name in ("a", "<b>"):
        plain(tmp_path / name, intervals=30, samples=5_000)
    found = notebook.report(tmp_path / "a", tmp_path / "<b>")
    html = found._repr_html_()
    assert 'alt="Throughput of all runs' in html
    assert "<h4>&lt;b&gt;: finished</h4>" in html
    assert "<b>" not in html
    found.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
