"""Copies of a run's checkpoints, for Tune to keep, and from Tune's into the folder of a new run.

A copy holds the files of the checkpoint, so that ``model.pt`` loads without offload or Tune, and the configuration of the trial that
wrote it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from offload.report.run_dir import EVENTS
from offload.train.checkpoints.run_folder import OWN_FILES, RunFolder, new_name
from offload.train.checkpoints.storage import CHECKSUMS_FILE, METRICS_FILE

CONFIG_FILE = "trial.json"
KEEP = 10_000  # checkpoints: the run may be ahead of the results that Tune has asked for


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts from.

    Args:
        path: a local folder with the files of a checkpoint, for as long as this object lives.
        config: the configuration of the trial that wrote it, as JSON.
        of_another: whether that is another configuration than the one that starts from it.
    """

    path: Path
    config: str
    of_another: bool

    @property
    def step(self) -> int:
        """The optimizer steps that the checkpoint holds."""
        return int(json.loads((self.path / METRICS_FILE).read_text(encoding="utf-8"))["step"])


def save(folder: RunFolder, step: int, target: Path, config: Mapping[str, Any]) -> None:
    """Copy the checkpoint of this step, or if there is none the newest, to a local folder. Without any, the copy stands for the beginning
    of the training."""
    if entries := folder.entries():
        # The newest of this step: a run that went back has written it twice.
        name = next((entry.name for entry in reversed(entries) if entry.metrics.get("step") == step), entries[-1].name)
        pafs.copy_files(folder.path_of(name), str(target), source_filesystem=folder.fs)
    (target / CONFIG_FILE).write_text(_in_json(config), encoding="utf-8")


def remove_before(folder: RunFolder, step: int) -> None:
    """Remove the checkpoints of earlier steps, of which Tune has what it wants. One that cannot be removed now goes later."""
    with contextlib.suppress(OSError):
        for entry in folder.entries():
            if entry.metrics.get("step", step) < step:
                folder.remove(entry.name)


def remove_all(folder: RunFolder) -> None:
    """Remove all checkpoints."""
    with contextlib.suppress(OSError):
        folder.fs.delete_dir(folder.path)


def save_start(start: Start | None, target: Path) -> None:
    """Copy what a run is going to start from, as it was."""
    if start is not None:
        shutil.copytree(start.path, target, dirs_exist_ok=True)
    (target / CONFIG_FILE).write_text("" if start is None else start.config, encoding="utf-8")


def load(source: Path, config: Mapping[str, Any]) -> Start | None:
    """Read a copy; None for the beginning of the training. ``config``: that of the trial that starts from it."""
    if not (source / CHECKSUMS_FILE).exists():
        return None
    files = Path(tempfile.mkdtemp(prefix="offload-"))
    for name in OWN_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, files / name)
    try:
        written = (source / CONFIG_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        written = ""
    start = Start(path=files, config=written, of_another=written != _in_json(config))
    weakref.finalize(start, shutil.rmtree, files, ignore_errors=True)
    return start


def put(start: Start, run_dir: Path, folder: RunFolder) -> None:
    """Let a new run begin from a checkpoint: its directory becomes that of an unfinished run."""
    folder.put(new_name([]), start.path)
    (run_dir / EVENTS).touch()


def _in_json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, default=repr)
