"""The examples run as their first lines say, and the tutorial's first step changes as few lines as it promises."""

from __future__ import annotations

import difflib
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.train

from offload.cli.script import build_trainer
from offload.demo_data import make_demo_data

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TUTORIAL = EXAMPLES / "tutorial"
MOST_LINES = 8
DEADLINE_S = 800

pytestmark = [pytest.mark.slow, pytest.mark.ray]


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


def fit(script: str, *arguments: str, workers: tuple[int, int] | None = None) -> dict[str, Any]:
    """The summary of what ``offload run examples/SCRIPT --overwrite -- ARGUMENTS`` trains, on the Ray that the tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, Path(script).stem, None)  # undone at the end: adaptdl.py would hide the library
        del sys.modules[Path(script).stem]
        trainer = build_trainer(EXAMPLES / script, arguments, address="auto")
        if workers is not None:
            trainer.workers = workers
            trainer.scaling_config = ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5})
        summary = trainer.fit(run_dir=Path("runs") / Path(script).stem, overwrite=True, quiet=True).document
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


@pytest.fixture
def inside(folder: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is that folder."""
    monkeypatch.chdir(folder)


@pytest.mark.soak
def test_the_plain_script(folder: Path) -> None:
    assert "epoch 3  loss" in run(folder, sys.executable, str(TUTORIAL / "step_0_plain.py")).stdout


@pytest.mark.soak
def test_the_offloaded_script(folder: Path) -> None:
    assert "epoch 3  loss" in run(folder, sys.executable, str(TUTORIAL / "step_1_offloaded.py")).stdout


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_bytes_on_the_wire() -> None:
    summary = fit("tutorial/step_2_uint8.py")
    assert summary["input"]["train"]["wire_bytes_per_sample"] < 96 * 96 * 3 * 1.1


@pytest.mark.usefixtures("inside")
def test_validation_and_inference(folder: Path) -> None:
    summary = fit("tutorial/step_3_validation.py")
    assert summary["input"]["train"]["wire_bytes_per_sample"] < 96 * 96 * 3 * 1.1  # uint8
    assert 0 <= summary["metrics"]["val_accuracy"] <= 1  # three epochs of a toy learn little
    inference = [sys.executable, str(TUTORIAL / "step_4_inference.py"), str(summary["checkpoint"])]
    assert "class of a grey image:" in run(folder, *inference).stdout


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_quickstart_unchanged_with_a_range_of_workers() -> None:
    """tests/test_code_blocks.py trains it with one worker; the migrated programs below have a range."""
    summary = fit("quickstart.py", workers=(1, 4))
    assert (summary["epochs"], summary["workers"]) == (3, 4)


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_the_program_before_migration_from_ray_train(tmp_path: Path) -> None:
    main = importlib.import_module("examples.migrate.ray_before").main
    assert main(workers=1, storage_path=str(tmp_path)).error is None


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("ray_after", 2 * 256),
        pytest.param("adaptdl", 3 * 1024, marks=pytest.mark.soak),
        pytest.param("horovod_elastic", 2 * 256, marks=pytest.mark.soak),
    ],
)
def test_migrated_programs(name: str, samples: int) -> None:
    """With a range of workers, and every sample once an epoch."""
    summary = fit(f"migrate/{name}.py", workers=(1, 2))
    assert (summary["samples"], summary["workers"]) == (samples, 2)


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_images_as_from_a_tf_data_service() -> None:
    summary = fit("migrate/tf_data_service.py", str(Path("runs") / "tutorial-data" / "train"))
    assert (summary["epochs"], summary["samples"]) == (2, 2 * 800)
    assert summary["input"]["train"]["wire_bytes_per_sample"] < 64 * 64 * 3 * 1.1  # uint8


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_vit_blur(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its first lines say: 602 kB a sample as published, a quarter of it with --uint8."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    published, _ = importlib.import_module("vit_blur").RandomImages(1)[0]
    assert published.nbytes == 4 * 3 * 224**2
    summary = fit("vit_blur.py", "--samples", "64", "--batch-size", "16", "--depth", "1", "--uint8")
    assert summary["samples"] == 64
    assert summary["input"]["train"]["wire_bytes_per_sample"] == pytest.approx(3 * 224**2, rel=0.01)


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_image_classification() -> None:
    few = ["--model", "resnet10t", "--pixels", "64", "--epochs", "1"]
    summary = fit("image_classification.py", str(Path("runs") / "tutorial-data"), *few)
    assert 0 <= summary["metrics"]["val_accuracy"] <= 1


@pytest.mark.soak
@pytest.mark.usefixtures("inside")
def test_tabular() -> None:
    """A Ray Dataset whose every step runs in the pool."""
    summary = fit("tabular.py")
    assert summary["epochs"] == 3
    assert 0.8 <= summary["metrics"]["accuracy"] <= 1
