"""The demo's comparison: one loop, two loaders, a rate predicted beforehand, and words that say what is emulated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

import offload
from offload.cli.demo import comparison
from offload.cli.demo import side as program
from offload.cli.demo.comparison import SECONDS, Comparison, Side, compare, host_cores, predicted_samples_per_s
from offload.cli.demo.picture import compare_and_show, words, write
from offload.cli.demo.side import BATCH_SIZE, measured, measured_costs
from offload.cli.main import main
from offload.errors import RunError
from tests.report.runs import plain

QUIET = Console(quiet=True)
PACED = "paced accelerator of 5,000 images/s"


def side(name: str, *, cores: int, rate: float, device: str = PACED) -> Side:
    """Ten seconds at this rate, half of them without a batch."""
    steps = [float(number) for number in range(1, 11)]
    samples = [round(rate)] * 10
    return Side(name=name, cores=cores, device=device, at=steps, samples=samples, waited_s=5.0)


def both(
    alone: float, offloaded: float, *, predicted: float = 520.0, device: str = PACED, core_share: float = 0.95
) -> Comparison:
    """A comparison of one core with four."""
    return Comparison(
        alone=side("torch DataLoader", cores=1, rate=alone, device=device),
        offloaded=side("offload", cores=4, rate=offloaded, device=device),
        predicted_samples_per_s=predicted,
        core_share=core_share,
    )


def test_the_loop_measures_rate_and_waiting_after_its_first_batch() -> None:
    now = 0.0

    def batches() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal now
        for wait in (100.0, 3.0, 3.0, 3.0, 3.0):
            now += wait
            yield [0] * 8, [0] * 8

    def step(images: list[int], labels: list[int]) -> None:
        nonlocal now
        now += 1.0

    found = measured(batches(), step, 8.0, clock=lambda: now)
    assert found == {"at": [4.0, 8.0], "samples": [8, 8], "waited_s": 6.0}


@pytest.mark.parametrize("cores", [2, 3, 4, 8, 20, 128])
def test_the_host_has_a_core_and_leaves_some(cores: int) -> None:
    assert 1 <= host_cores(cores) <= cores // 2


def test_costs_are_the_workers_time_after_their_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ([0] * BATCH_SIZE, [0] * BATCH_SIZE)

    def batches(*_: Any) -> Iterator[Any]:
        # The first times hold each worker's start. For a batch, worker 0 takes 0.2 s of CPU time and waits 0.1 s for a core; worker 1 takes
        # 0.4 s and does not wait.
        for number in range(3):
            yield batch, (0, 7.0 + 0.2 * number, 3.0 + 0.1 * number)
            yield batch, (1, 9.0 + 0.4 * number, 5.0)

    monkeypatch.setattr(program, "batches", batches)
    costs = measured_costs(Path(), lambda images, labels: None, workers=2, seconds=1e9)
    assert costs["core_seconds_per_sample"] == pytest.approx((0.4 + 0.8) / (4 * BATCH_SIZE))
    assert costs["core_share"] == pytest.approx(1.2 / 1.4)
    assert costs["batch_size"] == BATCH_SIZE


@given(
    core_s=st.floats(1e-4, 1.0),
    core_share=st.floats(0.05, 1.0),
    step_s=st.floats(1e-5, 1.0),
    cores=st.integers(2, 128),
)
def test_neither_the_cores_nor_the_accelerator_do_more_than_they_can(
    core_s: float, core_share: float, step_s: float, cores: int
) -> None:
    costs = {
        "core_seconds_per_sample": core_s,
        "core_share": core_share,
        "step_s_per_sample": step_s,
        "batch_size": float(BATCH_SIZE),
    }
    rate = predicted_samples_per_s(costs, cores)
    ceiling = min(core_share * cores / core_s, 1 / step_s)
    assert 0.9 * ceiling <= rate <= ceiling * (1 + 1e-9)
    assert predicted_samples_per_s(costs, cores + 1) >= rate


def test_a_gain_and_its_absence_are_said_with_the_prediction_and_what_is_emulated() -> None:
    gain = words(both(200.0, 500.0))
    assert "offload, 4 cores" in gain
    gain = " ".join(gain.split())
    assert "200 images/s on the GPU host's 1 core alone, 500 with the rest of the 4 cores: 2.50× the rate." in gain
    none = " ".join(words(both(200.0, 190.0)).split())
    assert "no gain on this machine, 0.95× the rate." in none
    for text in (gain, none):
        assert "The model had predicted 520 beforehand." in text
        assert "Emulation: one machine stands for a GPU host and a CPU host" in text
        assert "A paced accelerator of 5,000 images/s stands in for a GPU: it takes time and computes nothing." in text


def test_a_busy_machine_makes_rough_rates() -> None:
    assert "Other programs" not in words(both(200.0, 500.0))
    text = " ".join(words(both(200.0, 500.0, core_share=0.4)).split())
    assert (
        "Other programs had 60% of the cores while the prediction was measured, so that these rates are rough." in text
    )


def test_a_gpu_is_not_called_a_stand_in() -> None:
    assert "stands in" not in words(both(200.0, 500.0, device="NVIDIA H100 80GB HBM3"))


@pytest.mark.parametrize("width", [50, 80, 200])
def test_bars_are_as_long_as_the_rates_and_fit_the_terminal(width: int) -> None:
    lines = words(both(100.0, 400.0, predicted=200.0), width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    alone, predicted, offloaded = (line.count("█") for line in lines[1:4])
    assert predicted == pytest.approx(2 * alone, abs=2)
    assert offloaded == pytest.approx(4 * alone, abs=4)


def test_help_says_how_long_the_loops_run() -> None:
    text = " ".join(CliRunner().invoke(main, ["demo", "--help"]).stdout.split())
    assert text.count(f"for {SECONDS:.0f} s with") == 2


def test_the_page_shows_both_beside_the_run(tmp_path: Path) -> None:
    run = plain(tmp_path / "run", intervals=30, samples=5_000)
    page = write(run, both(200.0, 500.0))
    html = page.read_text()
    for text in ("torch DataLoader, 1 core", "offload, 4 cores", "predicted for offload", "2.50×", PACED, "Emulation:"):
        assert text in html
    with Image.open(run / "comparison.png") as picture:
        assert min(picture.size) > 200
    document = json.loads((run / "comparison.json").read_text())
    found = [
        (each["cores"], each["samples_per_s"], each["stall"], each["predicted_samples_per_s"])
        for each in document["sides"]
    ]
    assert found == [(1, 200.0, 0.5, None), (4, 500.0, 0.5, 520.0)]


def test_one_core_leaves_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "usable_cores", lambda: 1)
    after = compare_and_show(tmp_path, QUIET)
    assert after(tmp_path) == ({"comparison": None}, "")
    assert capsys.readouterr().out == "This machine has one core, so that there is nothing to offload to.\n"


def test_a_run_directory_that_cannot_be_used_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = plain(tmp_path / "run", intervals=30, samples=5_000)
    done = CliRunner().invoke(main, ["demo", "--run-dir", str(run), "--data", str(tmp_path / "data")])
    assert done.exit_code == 2
    assert "holds a finished run. Pass --overwrite to replace it" in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], tuple[Result, offload.Trainer]]:
    """A function that runs the demo up to its training, which fails; it returns the command's result and the Trainer."""
    trainers: list[offload.Trainer] = []

    def fit(trainer: offload.Trainer, **_: Any) -> None:
        trainers.append(trainer)
        raise RunError("the training failed.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(offload.Trainer, "fit", fit)

    def run() -> tuple[Result, offload.Trainer]:
        where = ["--run-dir", str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--images", "50"]
        return CliRunner().invoke(main, ["demo", *where]), trainers[-1]

    return run


def test_the_picture_is_printed_before_the_training(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.cli.demo.picture.compare", lambda *_: both(200.0, 500.0))
    done, _ = untrained()
    assert done.exit_code == 1
    assert "2.50× the rate" in done.stdout
    assert done.stderr.splitlines()[-1] == "offload: the training failed."


def test_on_one_core_the_worker_leaves_it_to_preprocessing(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.machine.usable_cores", lambda: 1)
    monkeypatch.setattr(comparison, "usable_cores", lambda: 1)
    done, trainer = untrained()
    assert "one core" in done.stdout
    assert trainer.overrides.cpus_per_worker == 0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_side_that_fails_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"comparison \(torch\) failed: FileNotFoundError.*--no-compare"):
        compare(tmp_path, QUIET)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_both_loaders_run_the_loop(jpeg_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    found = compare(jpeg_folder, QUIET, seconds=0.5)
    assert found is not None
    assert (found.alone.cores, found.offloaded.name) == (host_cores(found.offloaded.cores), "offload")
    assert found.predicted_samples_per_s > 0
    for each in (found.alone, found.offloaded):
        assert each.at[-1] >= 0.5
        assert each.samples == [32] * len(each.at)
        assert each.device == found.alone.device
