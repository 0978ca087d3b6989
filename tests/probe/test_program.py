"""Probing a program that iterates over an offload.DataLoader."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offload.cli.main import main
from offload.errors import ConfigError, RunError
from offload.loader.probing import LEAST_STEPS, WARM_STEPS, LoaderProbe, ProbedError
from offload.measure.findings import profile_document
from offload.model.profile import Profile
from offload.probe.program import probe_program
from offload.probe.work import SampleWork
from tests.helpers import end_loaders

PROGRAM = """
import sys, time
from pathlib import Path
import torch, offload

class Busy(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        until = time.process_time() + 0.004
        while time.process_time() < until:
            pass
        return torch.zeros(1000), i

def train(folder):
    checks = offload.DataLoader(Busy(), batch_size=4)
    next(iter(checks))
    batches = offload.DataLoader(Busy(), batch_size=16)
    for x, y in batches:
        time.sleep(0.05)
        x += 1
    Path(folder, "trained").touch()

if __name__ == "__main__":
    train(sys.argv[1])
"""


def probed(script: Path, loader: str, *args: str) -> dict[str, object]:
    known = {"workload": str(script), "measured": {}}
    works: list[SampleWork | None] = []
    found = probe_program(
        script, args, loader=loader, address=None, quiet=True, known=known, drain_s=2.0, replay_s=1.0, then=works.append
    )
    assert found is not None
    assert [work is not None and work.samples for work in works] == [64]
    return profile_document(found)


@pytest.fixture
def _free_cores_afterwards() -> Iterator[None]:
    yield
    end_loaders()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster", "_free_cores_afterwards")
def test_a_program_is_measured_inside_its_loop_and_a_plan_can_use_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    document = probed(script, "batches", str(tmp_path))
    assert not (tmp_path / "trained").exists()  # it ended in its loop
    profile = Profile.from_document(json.loads(json.dumps(document)))
    assert profile.batch_size == 16
    assert profile.input.core_seconds_per_sample >= 0.004
    assert profile.input.wire_bytes_per_sample > 4000
    assert profile.step_time.predict(1, 1, 16) >= 0.05
    with pytest.raises(
        ConfigError, match=r"without iterating over an offload.DataLoader in a variable 'loader'.*batches, checks"
    ):
        probed(script, "loader", str(tmp_path))
    assert (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("x = 1\n", 2, "without iterating over an offload.DataLoader in a variable 'loader'"),
        ("raise ValueError('no data')\n", 1, "failed before its loader was measured: ValueError: no data"),
        ("import sys; sys.exit(3)\n", 1, "called sys.exit(3) before its loader was measured"),
    ],
)
def test_programs_that_cannot_be_measured_are_refused_in_a_sentence(
    tmp_path: Path, text: str, code: int, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    done = CliRunner().invoke(main, ["probe", str(script), "--loader", "loader"])
    assert done.exit_code == code
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_programs_own_help(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse; argparse.ArgumentParser(description='It trains.').parse_args()\n")
    done = CliRunner().invoke(main, ["probe", str(script), "--loader", "loader", "--", "--help"])
    assert done.exit_code == 0
    assert "It trains." in done.output
    assert "offload.DataLoader" not in done.output


def test_a_failure_of_the_program_names_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("1 / 0\n")
    with pytest.raises(RunError, match="ZeroDivisionError"):
        probed(script, "loader")


class Batches:
    """An iteration over one batch after the other."""

    def with_samples(self) -> Iterator[tuple[Any, int]]:
        while True:
            yield [1, 2], 2

    def costs(self) -> list[tuple[float, float]]:
        return [(0.001, 8.0)]

    def close(self) -> None: ...


@pytest.mark.parametrize(("batches", "enough"), [(WARM_STEPS + LEAST_STEPS + 1, True), (WARM_STEPS + 1, False)])
def test_a_program_that_leaves_its_loop_is_measured_if_it_made_enough_steps(batches: int, enough: bool) -> None:
    probe = LoaderProbe(name="loader", tell=lambda phase, share: None, drain_s=1e-9, replay_s=1e9)
    iteration: Any = Batches()
    for number, _ in enumerate(probe.measure(iteration), 1):
        if number == batches:
            break
    assert (probe.step_s > 0) == enough
    assert (probe.samples, probe.costs) == (2, [(0.001, 8.0)])
    following: Any = object()
    with pytest.raises(ProbedError) if enough else contextlib.nullcontext():
        probe.wants(following)


def test_a_loader_that_no_variable_holds_is_told_apart_from_none() -> None:
    class Model:
        def __init__(self, probe: LoaderProbe) -> None:
            self.loaders: Any = {"train": object()}
            self.probe = probe

        def fit(self) -> bool:
            return self.probe.wants(self.loaders["train"])

    probe = LoaderProbe(name="loader", tell=lambda phase, share: None, drain_s=1.0, replay_s=1.0)
    assert probe.iterated == "It iterated over none."
    assert not Model(probe).fit()
    assert probe.iterated.startswith("It iterated over a loader that no variable holds, but an attribute")
    checks: Any = object()
    assert not probe.wants(checks)
    assert probe.iterated.startswith("It iterated over checks and a loader that no variable holds")


@pytest.mark.parametrize(("speed", "said"), [("0.005", "must be at least 0.01"), ("200", "must be at most 100")])
def test_a_core_speed_that_no_profile_may_hold_is_refused_before_anything_is_measured(speed: str, said: str) -> None:
    done = CliRunner().invoke(main, ["probe", "none.py", "--core-speed", speed])
    assert done.exit_code == 2
    assert f"--core-speed {said}" in done.output
