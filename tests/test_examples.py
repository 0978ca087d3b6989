"""The examples run as their first lines say, and the tutorial's first step changes as few lines as it promises."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offload.demo_data import make_demo_data

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TUTORIAL = EXAMPLES / "tutorial"
MOST_LINES = 8
DEADLINE_S = 150

# One after another, each on a Ray of its own: a start is most of what they take.
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(2 * DEADLINE_S + 30)]


def code_of(path: Path) -> list[str]:
    """The lines of a script behind its docstring."""
    return [line.split("  # ")[0] for line in path.read_text().split('"""\n', 2)[1].splitlines()]


def test_a_plain_script_is_offloaded_by_eight_lines() -> None:
    before, after = (code_of(TUTORIAL / name) for name in ("step_0_plain.py", "step_1_offloaded.py"))
    changes = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(changes) <= MOST_LINES, changes
    marked = re.findall("# 1$", (TUTORIAL / "step_1_offloaded.py").read_text(), re.MULTILINE)
    assert len(marked) == len(changes)


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def offload_run(folder: Path, script: str, *arguments: str) -> dict[str, object]:
    """The summary of ``offload run examples/SCRIPT -- ARGUMENTS``."""
    command = [
        sys.executable,
        "-m",
        "offload",
        "run",
        str(EXAMPLES / script),
        "--overwrite",
        "--json",
        "--",
        *arguments,
    ]
    summary: dict[str, object] = json.loads(run(folder, *command).stdout)
    assert summary["status"] == "finished"
    return summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples leave their data and runs, one for all. The data are drawn once: where an example finds those that it
    would draw, it takes them."""
    folder = tmp_path_factory.mktemp("examples")
    make_demo_data(folder / "runs" / "tutorial-data", images=1000)
    (folder / "runs" / "quickstart-data").symlink_to("tutorial-data")
    return folder


def test_the_plain_script(folder: Path) -> None:
    assert "epoch 3  loss" in run(folder, sys.executable, str(TUTORIAL / "step_0_plain.py")).stdout


def test_the_offloaded_script(folder: Path) -> None:
    assert "epoch 3  loss" in run(folder, sys.executable, str(TUTORIAL / "step_1_offloaded.py")).stderr


def test_bytes_on_the_wire(folder: Path) -> None:
    summary = offload_run(folder, "tutorial/step_2_uint8.py")
    assert summary["input"]["train"]["wire_bytes_per_sample"] < 96 * 96 * 3 * 1.1  # type: ignore[index]


def test_validation_and_inference(folder: Path) -> None:
    summary = offload_run(folder, "tutorial/step_3_validation.py")
    assert 0 <= summary["metrics"]["val_accuracy"] <= 1  # type: ignore[index]  # three epochs of a toy learn little
    checkpoint = str(summary["checkpoint"])
    assert (
        "class of a grey image:"
        in run(folder, sys.executable, str(TUTORIAL / "step_4_inference.py"), checkpoint).stdout
    )


def test_quickstart(folder: Path) -> None:
    assert offload_run(folder, "quickstart.py")["epochs"] == 3


def test_vit_blur(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its first lines say: 602 kB a sample as published, a quarter of it with --uint8."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    published, _ = importlib.import_module("vit_blur").RandomImages(1)[0]
    assert published.nbytes == 4 * 3 * 224**2
    summary = offload_run(folder, "vit_blur.py", "--samples", "64", "--batch-size", "16", "--depth", "1", "--uint8")
    assert summary["samples"] == 64
    assert summary["input"]["train"]["wire_bytes_per_sample"] == pytest.approx(3 * 224**2, rel=0.01)  # type: ignore[index]


def test_image_classification(folder: Path) -> None:
    data = str(folder / "runs" / "tutorial-data")
    few = ["--model", "resnet10t", "--pixels", "64", "--epochs", "1"]
    summary = offload_run(folder, "image_classification.py", data, *few)
    assert 0 <= summary["metrics"]["val_accuracy"] <= 1  # type: ignore[index]


ELASTIC = """
import importlib, json, sys
import ray, ray.train
import offload

name, *sys.argv[1:] = sys.argv[1:]
ray.init("local", num_cpus=4, log_to_driver=False)
trainer = importlib.import_module(name).build()
trainer.workers = (1, 4)
trainer.scaling_config = ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5})
document = trainer.fit(run_dir=f"runs/elastic-{name}", quiet=True).document
print(json.dumps([document["status"], document["workers"]]))
"""


def test_an_example_runs_unchanged_with_a_range_of_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    done = run(folder, sys.executable, "-c", ELASTIC, "quickstart")
    assert json.loads(done.stdout.splitlines()[-1]) == ["finished", 4]
