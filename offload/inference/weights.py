"""Find a checkpoint by the path that a user gives, and read a model's weights from it.

The path is a run directory, its folder of checkpoints, one checkpoint, or a file with a plain ``state_dict``.
Where it stops: :mod:`offload.train.checkpoints` knows the format of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import torch

from offload.errors import ConfigError, OffloadError, RunError
from offload.pipeline.sources.storage_paths import open_filesystem
from offload.report.run_dir import CHECKPOINTS
from offload.train.checkpoints.format import checksum, load_model
from offload.train.checkpoints.local_copy import local_copy
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import MODEL_FILE, Storage


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a model.

    Args:
        path: the checkpoint from which they come.
        state: the model's ``state_dict``, on the CPU.
        identity: the size and checksum of their file.
    """

    path: str
    state: dict[str, Any] = field(repr=False)
    identity: str

    def fill(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with these weights, in evaluation mode. Raises ConfigError if they belong to another model."""
        try:
            model.load_state_dict(self.state)
        except RuntimeError as error:
            reasons = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
            first = reasons[0] if reasons else str(error)
            first = first if len(first) <= 300 else f"{first[:300]}…"
            raise ConfigError(
                f"the checkpoint {self.path} is not of the model {type(model).__name__}: {first.rstrip('. ')}. Build the model as its "
                "training did, or name the checkpoint of this model."
            ) from None
        return model.eval()


def read_weights(path: str) -> Weights:
    """The weights under a path: of the newest checkpoint of a run, of one checkpoint, or in a file with a ``state_dict``.

    Raises ConfigError if there is no checkpoint, or if it is damaged or holds something else.
    """
    fs, inner = open_filesystem(path)
    try:
        kind = fs.get_file_info(inner).type
        if kind == pafs.FileType.NotFound:
            raise ConfigError(
                f"there is no checkpoint {path}. Name a run directory, a folder checkpoint_TIME in it, or a file with a state_dict."
            )
        if kind == pafs.FileType.File:
            with local_copy(fs, inner) as copy:
                return _read(copy, path)
        folder = _checkpoint_in(path, fs, inner)
        with local_copy(fs, folder) as copy:
            return _read(copy, folder if isinstance(fs, pafs.LocalFileSystem) else path)
    except OffloadError:
        raise
    except OSError as error:
        raise ConfigError(f"the checkpoint {path} cannot be read: {error.strerror or error}.") from None


def _checkpoint_in(path: str, fs: pafs.FileSystem, folder: str) -> str:
    """The folder of the newest complete checkpoint in this folder, which may be one itself."""
    if fs.get_file_info(f"{folder}/{MODEL_FILE}").type == pafs.FileType.File:
        return folder
    inner = f"{folder}/{CHECKPOINTS}"
    of_run = fs.get_file_info(inner).type == pafs.FileType.Directory
    parent, _, name = (inner if of_run else folder).rstrip("/").rpartition("/")
    checkpoints = RunFolder(Storage(path=parent or "/", filesystem=fs), name)
    whole = checkpoints.whole()
    if not whole:
        raise ConfigError(
            f"{path} holds no complete checkpoint. Name a run directory, a folder checkpoint_TIME in it, or a file with a state_dict."
        )
    return checkpoints.path_of(whole[-1])


def _read(path: Path, called: str) -> Weights:
    try:
        state = load_model(path, called)
    except RunError as error:  # nothing has begun
        raise ConfigError(str(error)) from None
    file = path / MODEL_FILE if path.is_dir() else path
    known = checksum(file)
    return Weights(path=called, state=state, identity=f"{known['bytes']} bytes, crc32 {known['crc32']:08x}")
