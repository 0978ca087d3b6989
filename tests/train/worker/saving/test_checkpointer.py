"""Checkpoints that cannot be written on the worker's own host."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray.train

from offload.errors import RunError
from offload.train.checkpoints import format as checkpoints
from offload.train.worker.saving import checkpointer


def full(folder: Path, *content: Any) -> None:
    (folder / "model.pt").write_bytes(b"a part")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_temporary_folder_is_named_and_not_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoints, "save", full)
    told = rf"could not be written to a temporary folder of .*: No space left on device\. Free space in {tmp_path}, .* TMPDIR"
    with pytest.raises(RunError, match=told):
        checkpointer._report({}, ({}, {}))
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(RunError, match=r"No such file or directory\. Free space in .*gone, or name another"):
        checkpointer._report({}, ({}, {}))


def test_a_full_storage_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(metrics: Any, checkpoint: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray.train, "report", report)
    with pytest.raises(
        RunError, match=r"the checkpoint could not be stored: No space left on device\..* another storage_path"
    ):
        checkpointer._report({}, ({}, {}))
    assert not list(tmp_path.iterdir())
