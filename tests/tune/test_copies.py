"""Copies of checkpoints for Tune: of the right step, loadable as a start, and with the configuration of their trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints.run_folder import RunFolder, new_name
from offload.train.checkpoints.storage import Storage
from offload.tune import copies


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The checkpoints of a run after steps 4 and 8."""
    run = RunFolder(Storage(path=str(tmp_path / "run"), filesystem=None), "checkpoints")
    for step in (4, 8):
        files = tmp_path / f"files-{step}"
        files.mkdir()
        checkpoints.save(files, {"weight": torch.tensor(float(step))}, {}, {"step": step})
        run.put(new_name(run.whole()), files)
    return run


def steps(folder: RunFolder) -> list[int]:
    return [entry.metrics["step"] for entry in folder.entries()]


def copied(folder: RunFolder, step: int, target: Path, lr: float = 0.1) -> Path:
    target.mkdir()
    copies.save(folder, step, target, {"lr": lr})
    return target


def test_a_copy_has_the_wanted_step_and_knows_its_configuration(folder: RunFolder, tmp_path: Path) -> None:
    copy = copied(folder, 4, tmp_path / "copy")
    assert torch.load(copy / "model.pt")["weight"] == 4
    same, other = copies.load(copy, {"lr": 0.1}), copies.load(copy, {"lr": 0.2})
    assert same is not None
    assert other is not None
    assert (same.step, same.of_another, other.of_another) == (4, False, True)
    # A run that has not begun passes it on as it was.
    on = tmp_path / "on"
    on.mkdir()
    copies.save_start(other, on)
    again = copies.load(on, {"lr": 0.1})
    assert again is not None
    assert (again.step, again.of_another) == (4, False)


def test_of_two_checkpoints_of_a_step_the_newer_is_copied(folder: RunFolder, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    checkpoints.save(again, {"weight": torch.tensor(5.0)}, {}, {"step": 4})
    folder.put(new_name(folder.whole()), again)
    assert torch.load(copied(folder, 4, tmp_path / "copy") / "model.pt")["weight"] == 5


def test_a_run_starts_from_a_copy(folder: RunFolder, tmp_path: Path) -> None:
    start = copies.load(copied(folder, 99, tmp_path / "copy"), {})
    assert start is not None
    assert start.step == 8, "the newest, since there is none of step 99"
    run_dir = tmp_path / "next"
    run_dir.mkdir()
    run = RunFolder(Storage(path=str(run_dir), filesystem=None), "checkpoints")
    copies.put(start, run_dir, run)
    assert steps(run) == [8]


def test_what_tune_has_is_removed(folder: RunFolder) -> None:
    copies.remove_before(folder, 8)
    assert steps(folder) == [8]
    copies.remove_all(folder)
    copies.remove_all(folder)
    assert steps(folder) == []


def test_without_a_checkpoint_a_copy_stands_for_the_beginning(tmp_path: Path) -> None:
    empty = RunFolder(Storage(path=str(tmp_path / "run"), filesystem=None), "checkpoints")
    assert copies.load(copied(empty, 0, tmp_path / "copy"), {"lr": 0.1}) is None
