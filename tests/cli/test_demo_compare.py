"""The demo's comparison: one loop, two loaders, and words that say what is emulated."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from offload.cli.demo import comparison
from offload.cli.demo.comparison import SECONDS, Side, compare, host_cores, side_by_side, words, write
from offload.cli.demo.side import measured
from offload.cli.main import main
from offload.errors import RunError
from tests.report.runs import plain


def side(name: str, *, cores: int, rate: float) -> Side:
    """Ten seconds at this rate, half of them without a batch."""
    steps = [float(number) for number in range(1, 11)]
    samples = [round(rate)] * 10
    return Side(name=name, cores=cores, device="paced accelerator", at=steps, samples=samples, waited_s=5.0)


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


def test_a_gain_and_its_absence_are_said_and_emulation_is_named() -> None:
    alone = side("torch DataLoader", cores=1, rate=200.0)
    gain = words(alone, side("offload", cores=4, rate=500.0))
    assert "Offloading made this loop 2.50 times as fast on this machine." in gain
    none = words(alone, side("offload", cores=4, rate=190.0))
    assert "Offloading did not make this loop faster on this machine (0.95 times the rate)." in none
    for text in (gain, none):
        assert "paced accelerator" in text
        assert "on 1 core of 4, the GPU host's share" in text
        assert "Emulation: one machine stands for a GPU host and a CPU host" in text


def test_help_says_how_long_the_loops_run() -> None:
    text = " ".join(CliRunner().invoke(main, ["demo", "--help"]).stdout.split())
    assert text.count(f"for {SECONDS:.0f} s with") == 2


def test_the_page_shows_both_beside_the_run(tmp_path: Path) -> None:
    run = plain(tmp_path / "run", intervals=30, samples=5_000)
    page = write(run, side("torch DataLoader", cores=1, rate=200.0), side("offload", cores=4, rate=500.0))
    html = page.read_text()
    for text in ("torch DataLoader, 1 core", "offload, 4 cores", "2.50×", "paced accelerator", "Emulation:"):
        assert text in html
    with Image.open(run / "comparison.png") as picture:
        assert min(picture.size) > 200
    document = json.loads((run / "comparison.json").read_text())
    assert [(each["cores"], each["samples_per_s"], each["stall"]) for each in document["sides"]] == [
        (1, 200.0, 0.5),
        (4, 500.0, 0.5),
    ]


def test_one_core_leaves_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "usable_cores", lambda: 1)
    fields, lines = side_by_side(tmp_path, tmp_path, quiet=True)
    assert fields == {"comparison": None}
    assert lines == "This machine has one core, so that there is nothing to offload to."


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_side_that_fails_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"comparison \(torch\) failed: FileNotFoundError.*--no-compare"):
        compare(tmp_path)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_both_loaders_run_the_loop(jpeg_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    found = compare(jpeg_folder, seconds=0.5)
    assert found is not None
    alone, offloaded = found
    assert (alone.cores, offloaded.name) == (host_cores(offloaded.cores), "offload")
    for each in found:
        assert each.at[-1] >= 0.5
        assert each.samples == [32] * len(each.at)
        assert each.device == alone.device
