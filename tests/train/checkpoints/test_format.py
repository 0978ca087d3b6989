"""A checkpoint on disk: whole, of this version, and nothing that runs code; or refused with what to do."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import RunError
from offload.pipeline.order.ranges import Ranges
from offload.train.checkpoints import format as checkpoint
from offload.train.checkpoints.format import CHECKSUMS_FILE, MODEL_FILE, TRAINING_FILE, Progress, Training, rng_state

TRAINED = Training(
    progress=Progress(epoch=1, trained=Ranges.of(range(5)), step=3, samples=25, useful=20.0, passes={"val": 2}),
    optimizers=[{"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
    rng=[rng_state()],
    adapting={
        "noise": {"sqr": [1.0], "var": [2.0], "weight": 0.5, "paired": True},
        "workers": 2,
        "batch": [8, 0],
        "learned": {"steps": [[1, 2, 8, 0.1, 0.2, 5.0]], "delivered": 0.5},
    },
    sums={"loss": 1.5},
    seed=0,
    samples=20,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path, torch.nn.Linear(64, 64).state_dict(), TRAINED.to_state())
    return tmp_path


def test_what_is_saved_is_loaded(saved: Path) -> None:
    model, training = checkpoint.load(saved)
    assert model.keys() == {"weight", "bias"}
    assert training.progress == TRAINED.progress
    assert training.optimizers == TRAINED.optimizers
    assert training.adapting == TRAINED.adapting
    assert training.sums == TRAINED.sums
    checkpoint.set_rng_state(training.rng[0])


def test_samples_that_the_user_numbers_may_have_any_numbers(tmp_path: Path) -> None:
    """Such as hashes of 64 bits, of which half are negative."""
    progress = Progress(trained=Ranges(((-(2**62), 1 - 2**62), (3, 5))), step=1, samples=3)
    checkpoint.save(tmp_path, {}, dataclasses.replace(TRAINED, progress=progress, samples=None).to_state())
    assert checkpoint.load(tmp_path)[1].progress == progress


@pytest.mark.parametrize("name", [MODEL_FILE, TRAINING_FILE])
def test_a_file_that_was_cut_off_is_refused(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    expected = f"{name} has {len(content) // 2:,} bytes, and {len(content):,} were written"
    with pytest.raises(RunError, match=rf"{re.escape(expected)}.* Remove it to resume from the one before it"):
        checkpoint.load(saved)


def test_a_file_of_which_one_byte_is_another_is_refused(saved: Path) -> None:
    content = bytearray((saved / MODEL_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / MODEL_FILE).write_bytes(content)
    with pytest.raises(RunError, match=r"model.pt has other content than was written"):
        checkpoint.load(saved)


def test_a_file_that_is_missing_is_refused(saved: Path) -> None:
    (saved / TRAINING_FILE).unlink()
    with pytest.raises(RunError, match=r"is damaged: No such file"):
        checkpoint.load(saved)


@pytest.mark.parametrize("content", ["[]", '{"model.pt": 3}', '{"model.pt": {}}', "nonsense"])
def test_checksums_of_another_form_are_damage(saved: Path, content: str) -> None:
    (saved / CHECKSUMS_FILE).write_text(content)
    with pytest.raises(RunError, match=rf"{saved.name} is damaged: .*resume from the one before it"):
        checkpoint.load(saved)


ALTERED: dict[str, Any] = {
    "progress": [None, "nonsense", {}, torch.zeros(3), {**TRAINED.progress.to_state(), "epoch": "x"}]
    + [{**TRAINED.progress.to_state(), "trained": bad} for bad in ([[5, 3]], [[0, 99]], [[-2, 1]], 7, torch.ones(2))]
    + [{**TRAINED.progress.to_state(), "useful": bad} for bad in (float("nan"), float("inf"), -1.0, None)],
    "optimizers": [None, torch.zeros(2), {"state": {}}, [torch.zeros(2)], ["sgd"]],
    "others": [None, 3],
    "loose": [None, 3, [{}]],
    "scaler": [torch.zeros(1), []],
    "rng": [None, "seed", [3], [{}], [{**rng_state(), "torch": torch.zeros(3)}], [{**rng_state(), "python": {}}]],
    "adapting": [3, {"noise": {}}, {**TRAINED.adapting, "batch": [1]}, {**TRAINED.adapting, "learned": {"steps": 3}}],
    "sums": [[], {"loss": "much"}],
}


@pytest.mark.parametrize(("part", "content"), [(part, each) for part, bad in ALTERED.items() for each in bad])
def test_content_that_cannot_be_is_damage_whatever_the_checksums_say(saved: Path, part: str, content: Any) -> None:
    checkpoint.save(saved, {}, {**TRAINED.to_state(), part: content})
    with pytest.raises(RunError, match=rf"{saved.name} is damaged: '{part}' .*resume from the one before it"):
        checkpoint.load(saved)


def test_files_of_other_content_are_damage(saved: Path) -> None:
    for model, training in (
        (torch.zeros(3), TRAINED.to_state()),
        ({3: torch.zeros(3)}, TRAINED.to_state()),
        ({}, [1, 2]),
        ({}, {"nonsense": 1}),
        ({}, {**TRAINED.to_state(), "sums": {"__offload_type__": "deque", "content": 3}}),
    ):
        checkpoint.save(saved, model, training)  # type: ignore[arg-type]
        with pytest.raises(RunError, match=r" is damaged: "):
            checkpoint.load(saved)


def test_one_of_another_version_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", "offload.checkpoint/99")
    checkpoint.save(tmp_path, {}, TRAINED.to_state())
    monkeypatch.undo()
    with pytest.raises(
        RunError, match=r"schema 'offload.checkpoint/99'; this version reads .* or start again with over"
    ):
        checkpoint.load(tmp_path)


class Malicious:
    """Unpickled, it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_one_that_would_run_code_is_refused_and_runs_none(saved: Path) -> None:
    made = saved / "made"
    torch.save({"weight": Malicious(made)}, saved / MODEL_FILE)
    (saved / CHECKSUMS_FILE).unlink()  # whoever can forge a checkpoint can forge its checksums
    with pytest.raises(RunError, match=r"model.pt cannot be loaded: it holds a \w+.mkdir, which could run code"):
        checkpoint.load(saved)
    assert not made.exists()
