"""Where checkpoints are stored, checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.sources.files import open_filesystem


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A path for Ray Train, and its file system where the path alone does not name it."""

    path: str
    filesystem: Any = None


def storage_of(storage_path: str | None, filesystem: Any, run_dir: Path) -> Storage:
    """The user's storage path, or the run directory. Raises ConfigError for a scheme that nobody knows."""
    if storage_path is None:
        return Storage(path=str(run_dir))
    if "://" not in storage_path and filesystem is None:
        return Storage(path=str(Path(storage_path).expanduser().absolute()))
    fs, root = open_filesystem(storage_path, filesystem)
    if filesystem is None and not isinstance(fs, pafs.PyFileSystem):
        return Storage(path=storage_path)  # Ray opens it by its scheme
    return Storage(path=root, filesystem=fs)


def check_storage(storage: Storage) -> None:
    """Write and remove a small file there. Raises ConfigError where that fails: better now than after the first epoch."""
    fs, root = open_filesystem(storage.path, storage.filesystem)
    name = f"{root.rstrip('/')}/.offload-{uuid4().hex}"
    try:
        if isinstance(fs, pafs.LocalFileSystem):
            Path(root).mkdir(parents=True, exist_ok=True)
        with fs.open_output_stream(name) as stream:
            stream.write(b"\0" * (256 << 10))
        fs.delete_file(name)
    except OSError as error:
        # A file that could not be filled stays empty behind.
        try:
            fs.delete_file(name)
        except OSError:
            pass
        reason = os.strerror(error.errno) if error.errno else str(error).split("Detail:")[-1].strip()
        local = isinstance(fs, pafs.LocalFileSystem)
        remedy = (
            "Free space there or allow writing"
            if local
            else "Check the bucket's name, its endpoint and the credentials"
        )
        raise ConfigError(
            f"checkpoints cannot be stored under {storage.path!r}: {reason.rstrip('.')}. {remedy}, or choose another "
            "storage_path (an argument of offload.Trainer)."
        ) from None


def claim_folder(storage: Storage, name: str, *, resuming: bool, overwrite: bool) -> None:
    """Make sure that a new run does not take another's checkpoints for its own: the folder ``name`` must hold none, unless
    the run resumes. Under ``overwrite`` it is removed. Raises ConfigError."""
    if resuming:
        return
    fs, root = open_filesystem(storage.path, storage.filesystem)
    folder = f"{root.rstrip('/')}/{name}"
    if not fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True)):
        return
    if not overwrite:
        raise ConfigError(
            f"{storage.path}/{name} holds the checkpoints of another run. Pass --overwrite to remove them (fit(overwrite=True)), "
            "or choose another storage_path or run directory."
        )
    fs.delete_dir(folder)
