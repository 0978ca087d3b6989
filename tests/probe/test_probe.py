"""``offload probe`` on real scripts: a profile that a plan takes, and bad scripts named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offload.cli.main import main
from offload.cli.script import build_trainer
from offload.errors import RunError
from offload.measure.findings import profile_document
from offload.model import Profile
from offload.probe import driver
from offload.probe.driver import probe as measure
from tests.helpers import without_ray

DEADLINE_S = 800.0
FEW = ("--samples", "500")  # are drained sooner, where what the input costs is not what is asked

SCRIPT = '''
import argparse
import time

import numpy as np
import ray.train
import torch
from torchvision.transforms import v2

import offload


class Noise(torch.utils.data.Dataset):
    """Images whose transform costs a known share of the work."""

    def __init__(self, samples):
        self.samples = samples
        self.transform = v2.Compose([v2.GaussianBlur(11), v2.RandomHorizontalFlip()])

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
        return self.transform(image), np.int64(i % 10)


def train(ctx):
    print("printed while probing")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 10))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(3):
        for images, labels in ctx.batches("train", "image", "label"):
            time.sleep(ctx.config["slow_s"])
            if ctx.config["raises"]:
                raise ValueError("no such colour")
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            ctx.backward(loss)
            ctx.step()
        for batch in ctx.batches("val"):
            raise AssertionError("a probe validates nothing")
        ctx.report(loss=loss)


def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--raises", action="store_true")
    parser.add_argument("--slow-s", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=20_000)
    arguments = parser.parse_args()
    normalize = offload.Normalize(0.5, 0.25)
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Noise(arguments.samples), on_device=normalize), "val": offload.from_torch(Noise(64))},
        batch_size=32,
        workers=arguments.workers,
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
        train_loop_config={"raises": arguments.raises, "slow_s": arguments.slow_s},
    )
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "noise.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_script_is_probed_and_planned_with(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, on the Ray that the tests share, and sooner than in the minute that it takes itself."""
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(driver, "probe", partial(measure, seconds=10.0))
    written = script.with_name("profile.json")
    command = ["probe", script.name, "--address", "auto", "--apply", "-o", str(written), "--", "--samples", "5000"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    document = json.loads(written.read_text(), parse_constant=pytest.fail)
    assert document["equivalents"]["diff"] in done.stdout
    ours = document["equivalents"]
    assert ours["taken"] == ["offload.transforms.GaussianBlur"]
    assert ours["distances"][0]["largest"] <= 1
    assert "+        self.transform = v2.Compose([offload.transforms.GaussianBlur(11), v2.Random" in ours["diff"]
    assert not ours["written"]
    assert script.read_text() == SCRIPT
    assert sorted(path.name for path in script.parent.iterdir() if path.suffix) == ["noise.py", "profile.json"]

    profile = Profile.from_document(document)
    assert profile.workload == "noise.py"
    assert profile.device == "cpu"
    assert profile.batch_size == 32
    assert profile.noise is not None
    assert 3 * 64 * 64 <= profile.input.wire_bytes_per_sample <= 3 * 64 * 64 + 64
    stages = {stage.name: stage for stage in profile.stages}
    assert {"GaussianBlur", "RandomHorizontalFlip", "Noise", "pack"} <= set(stages)
    most = max(profile.stages, key=lambda stage: stage.core_seconds_per_sample)
    assert most.name == "GaussianBlur"
    assert stages["GaussianBlur"].bytes_out == 3 * 64 * 64
    assert document["measured"]["seconds"] > 0
    assert any("There is no GPU here" in line for line in document["verdict"])

    asked = ["plan", "--profile", str(written), "--gpu-type", "ml.g5.xlarge", "--cpu-type", "ml.c5.4xlarge"]
    refused = CliRunner().invoke(main, asked)
    assert refused.exit_code == 2
    assert "measured on cpu, and ml.g5.xlarge has NVIDIA A10G" in refused.stderr

    def warnings() -> list[str]:
        done = CliRunner().invoke(main, [*asked, "--gpu-speed", "40", "-o", "plan.json"], catch_exceptions=False)
        assert done.exit_code == 0
        found: list[str] = json.loads(Path("plan.json").read_text())["warnings"]
        return found

    assert not any("has changed since" in warning for warning in warnings())
    script.write_text(SCRIPT + "\n# changed\n")
    assert any("noise.py has changed since" in warning for warning in warnings())


def probed(script: Path, *arguments: str, seconds: float = 4.0) -> dict[str, Any]:
    """What the command finds in a few seconds, on the Ray that the tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", [*sys.path])
        trainer = build_trainer(script, arguments, address="auto")
        found = measure(
            trainer, address=None, quiet=True, known={"workload": script.name, "measured": {}}, seconds=seconds
        )
    assert found is not None
    return profile_document(found)


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_tell_what_synchronisation_costs(script: Path) -> None:
    document = probed(script, "--workers", "2", *FEW, seconds=8.0)
    profile = Profile.from_document(document)
    # How long two small gradients take to meet is the machine's business; that it was measured is ours.
    assert profile.step_time.predict(1, 2, 16) >= profile.step_time.predict(1, 1, 16)
    assert profile.input.host_cpus_per_worker >= 0.5
    assert not any("Synchronisation" in line for line in document["verdict"])


DATASET_SCRIPT = """
import numpy as np
import ray.data
import torch

import offload
from tests.helpers import without_ray


def halve(row):
    return {"x": np.full(1000, row["id"] % 256, dtype=np.uint8)}


def train(ctx):
    model = torch.nn.Linear(1000, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"].float()).mean())
            ctx.step()


def build():
    return offload.Trainer(train, datasets={"train": ray.data.range(20_000).map(halve)}, batch_size=32)
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_ray_dataset_is_probed_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(DATASET_SCRIPT)
    document = probed(tmp_path / "rows.py")
    profile = Profile.from_document(document)
    assert 1000 <= profile.input.wire_bytes_per_sample <= 1064
    assert profile.input.core_seconds_per_sample > 0
    assert profile.stages == ()  # Ray Data's operators are its own; they are not taken apart
    assert document["verdict"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_script_that_raises_is_named(script: Path) -> None:
    with pytest.raises(RunError, match=r"^the probed script failed: ValueError: no such colour"):
        probed(script, "--raises", *FEW)


@pytest.mark.soak
@pytest.mark.ray
def test_an_interrupted_probe_writes_nothing(script: Path) -> None:
    command = [Path(sys.executable).with_name("offload"), "probe", script.name, "-o", "profile.json"]
    command += ["--", "--slow-s", "1", *FEW]
    with subprocess.Popen(
        command, cwd=script.parent, env=without_ray(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "printed while probing" in line:
                break
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, error
    assert "the probe was interrupted; it has written nothing" in error
    assert out == ""
    assert [path.name for path in script.parent.iterdir() if path.suffix] == ["noise.py"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", "defines no build()"),
        ("def build():\n    return 3\n", "returned int; it must return an offload.Trainer"),
        ("raise ImportError('no such module')\n", "cannot be loaded: ImportError: no such module"),
    ],
)
def test_a_script_without_a_trainer_is_refused(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", [*sys.path])
        done = CliRunner().invoke(main, ["probe", str(tmp_path / "bad.py")])
    assert done.exit_code == 2
    assert said in done.output


def test_where_the_profile_goes_is_checked_first(script: Path) -> None:
    done = CliRunner().invoke(main, ["probe", str(script), "-o", "no/such/profile.json"])
    assert done.exit_code == 2
    assert "no/such/profile.json cannot be written" in done.output
