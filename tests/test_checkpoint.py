"""A checkpoint on disk: whole, of this version, and nothing that runs code; or refused with what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import RunError
from offload.train import checkpoint
from offload.train.checkpoint import CHECKSUMS_FILE, MODEL_FILE, TRAINING_FILE


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path, torch.nn.Linear(64, 64).state_dict(), {"step": 3})
    return tmp_path


def test_what_is_saved_is_loaded(saved: Path) -> None:
    model, training = checkpoint.load(saved)
    assert model.keys() == {"weight", "bias"}
    assert training["step"] == 3


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
    with pytest.raises(RunError, match="cannot be loaded"):
        checkpoint.load(saved)


def test_one_of_another_version_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", "offload.checkpoint/99")
    checkpoint.save(tmp_path, {}, {})
    monkeypatch.undo()
    with pytest.raises(
        RunError, match=r"schema 'offload.checkpoint/99'; this version reads .* or start again with --over"
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
    with pytest.raises(RunError, match="cannot be loaded"):
        checkpoint.load(saved)
    assert not made.exists()
