"""Copies of a run's checkpoints, for Tune to keep, and from Tune's into the folder of a new run.

A copy holds the files of the checkpoint, so that ``model.pt`` loads without offload or Tune, and the configuration of the trial that
wrote it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from offload.errors import RunError
from offload.report.run_dir import EVENTS
from offload.train.checkpoints.run_folder import OWN_FILES, RunFolder, new_name
from offload.train.checkpoints.storage import CHECKSUMS_FILE, METRICS_FILE

CONFIG_FILE = "trial.json"
TRIES = 3  # the run replaces its checkpoints meanwhile


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts from.

    Args:
        files: a folder with the files of a checkpoint, for as long as this object lives.
        config: the configuration of the trial that wrote it, as JSON.
        of_another: whether that is another configuration than the one that starts from it.
    """

    files: tempfile.TemporaryDirectory[str]
    config: str
    of_another: bool

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.files.name)

    @property
    def step(self) -> int:
        """The optimizer steps that the checkpoint holds."""
        return int(json.loads((self.path / METRICS_FILE).read_text(encoding="utf-8"))["step"])


def save(folder: RunFolder, step: int, target: Path, config: Mapping[str, Any]) -> None:
    """Copy the checkpoint of this step, or the newest if that is gone, to a local folder. Without any, the copy stands for the
    beginning of the training.

    Raises RunError if the storage does not answer.
    """
    for _ in range(TRIES):
        entries = folder.entries()
        if not entries:
            break
        name = next((entry.name for entry in entries if entry.metrics.get("step") == step), entries[-1].name)
        try:
            pafs.copy_files(folder.path_of(name), str(target), source_filesystem=folder.fs)
        except FileNotFoundError:
            continue
        if (target / CHECKSUMS_FILE).exists():
            break
    else:
        raise RunError(f"the checkpoints in {folder.path} changed while Tune wanted a copy: pass Checkpoints(keep=4).")
    (target / CONFIG_FILE).write_text(_in_json(config), encoding="utf-8")


def save_start(start: Start | None, target: Path) -> None:
    """Copy what a run is going to start from, as it was."""
    if start is not None:
        shutil.copytree(start.path, target, dirs_exist_ok=True)
    (target / CONFIG_FILE).write_text("" if start is None else start.config, encoding="utf-8")


def load(source: Path, config: Mapping[str, Any]) -> Start | None:
    """Read a copy; None for the beginning of the training. ``config``: that of the trial that starts from it."""
    if not (source / CHECKSUMS_FILE).exists():
        return None
    files = tempfile.TemporaryDirectory(prefix="offload-")
    for name in OWN_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, Path(files.name) / name)
    try:
        written = (source / CONFIG_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        written = ""
    return Start(files=files, config=written, of_another=written != _in_json(config))


def put(start: Start, run_dir: Path, folder: RunFolder) -> None:
    """Let a new run begin from a checkpoint: its directory becomes that of an unfinished run."""
    folder.put(new_name([]), start.path)
    (run_dir / EVENTS).touch()


def _in_json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, default=repr)
