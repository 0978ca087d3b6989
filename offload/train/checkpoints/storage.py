"""The storage of checkpoints, checked before anything starts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow.fs as pafs

from offload.errors import ConfigError, OffloadError, argument
from offload.pipeline.aside import DeadlineError, call_aside
from offload.pipeline.sources.storage_paths import escaped, open_filesystem

DEADLINE_S = 30.0

_ONE_SLASH = re.compile(r"(s3|gs|gcs|hdfs|abfs|abfss):/(?!/)")

_Answer = TypeVar("_Answer")

# The files of a checkpoint. They are defined here, since a search for complete checkpoints must not load torch.
MODEL_FILE = "model.pt"
TRAINING_FILE = "training.pt"
METRICS_FILE = "metrics.json"
CHECKSUMS_FILE = "checksums.json"

# What a run's entries in its folder begin with; anything else belongs to the user. Ray Train wrote the second one in earlier versions.
_RUNS_OWN = ("checkpoint_", ".validate_storage_marker")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The path of a storage, and its file system if the path alone does not name it."""

    path: str
    filesystem: Any = None


def storage_of(storage_path: str | None, filesystem: Any, run_dir: Path) -> Storage:
    """The user's storage path, or the run directory. Raises ConfigError for an unknown scheme, or a URI with one slash."""
    if storage_path is None:
        return Storage(path=str(run_dir))
    if _ONE_SLASH.match(storage_path) is not None:
        whole = storage_path.replace(":/", "://", 1)
        raise ConfigError(
            f"{argument('storage_path', storage_path)} is no URI: a slash is missing, as where a Path holds one. Pass the text {whole!r}."
        )
    if "://" not in storage_path and filesystem is None:
        try:
            return Storage(path=str(Path(storage_path).expanduser().absolute()))
        except RuntimeError:
            raise ConfigError(
                f"{argument('storage_path', storage_path)}: nobody knows the home folder {Path(storage_path).parts[0]}. Write the path in "
                "full."
            ) from None
    fs, root = open_filesystem(storage_path, filesystem)
    if filesystem is None and not isinstance(fs, pafs.PyFileSystem):
        return Storage(path=escaped(storage_path))  # its scheme names it
    return Storage(path=root, filesystem=fs)


def in_time(call: Callable[[], _Answer], where: str) -> _Answer:
    """Return the result of a call to the storage ``where``. Raises ConfigError if it takes longer than 30 s: the clients of some
    storages retry for minutes."""
    try:
        return call_aside(call, deadline_s=DEADLINE_S)
    except DeadlineError:
        raise ConfigError(
            f"the checkpoint storage {where!r} did not answer within {DEADLINE_S:.0f} s. Check the bucket's name, its endpoint, the "
            f"credentials and this machine's network, or choose another {argument('storage_path')}."
        ) from None


def check_storage(storage: Storage) -> None:
    """Write and remove a small file there. Raises ConfigError if that fails: better now than after the first epoch."""
    fs, root = open_filesystem(storage.path, storage.filesystem)
    name = f"{root.rstrip('/')}/.offload-{uuid4().hex}"
    try:
        if isinstance(fs, pafs.LocalFileSystem):
            Path(root).mkdir(parents=True, exist_ok=True)
        with fs.open_output_stream(name) as stream:
            stream.write(b"\0" * (256 << 10))
        fs.delete_file(name)
    except Exception as error:  # fsspec's file systems pass on their clients' own errors, such as botocore's
        # A failed write may leave an empty file.
        try:
            fs.delete_file(name)
        except Exception:
            pass
        raise _unusable("stored", storage, fs, error) from None


@contextlib.contextmanager
def telling_errors(storage: Storage) -> Iterator[None]:
    """Turn errors of the storage into ConfigError while the body finds or removes the checkpoints of earlier runs. :func:`check_storage`
    does not rule these errors out: a storage may allow nothing but writing."""
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        fs, _ = open_filesystem(storage.path, storage.filesystem)
        if not isinstance(error, OSError) and not isinstance(fs, pafs.PyFileSystem):  # see check_storage
            raise
        raise _unusable("looked for", storage, fs, error) from None


def _unusable(what: str, storage: Storage, fs: pafs.FileSystem, error: Exception) -> ConfigError:
    remedy = "Check the bucket's name, its endpoint and the credentials"
    if isinstance(fs, pafs.LocalFileSystem):
        remedy = "Free space there or allow writing" if what == "stored" else "Allow reading and writing there"
    return ConfigError(
        f"checkpoints cannot be {what} under {storage.path!r}: {reason_of(error)}. {remedy}, or choose another "
        f"{argument('storage_path')}."
    )


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A file in a local folder of checkpoints. A host that does not find it sees another folder of the same name."""

    path: str
    content: str

    @classmethod
    def of(cls, storage: Storage, name: str) -> Marker | None:
        """The marker of the run ``name``; None if all hosts reach the storage by its address."""
        fs, root = open_filesystem(storage.path, storage.filesystem)
        if not isinstance(fs, pafs.LocalFileSystem):
            return None
        return cls(path=f"{root}/.offload-{name.replace('/', '-')}", content=uuid4().hex)

    def put(self) -> None:
        """Write the file, on the driver."""
        Path(self.path).write_text(self.content)

    def remove(self) -> None:
        """Remove the file, on the driver, at the end. An unreachable folder is no error: the rest of the run must still end."""
        with contextlib.suppress(OSError):
            Path(self.path).unlink(missing_ok=True)

    def check(self) -> None:
        """Look for the file, on a worker. Raises ConfigError if it is missing, before hours of training that could not be stored."""
        try:
            is_here = Path(self.path).read_text() == self.content
        except OSError:
            is_here = False
        if not is_here:
            raise ConfigError(
                f"checkpoints go to {Path(self.path).parent} on the driver's host, and the worker's host {socket.gethostname()} does not "
                f"see that folder: pass {argument('storage_path', 's3://bucket/runs')}, or a folder that all hosts share."
            )


def reason_of(error: Exception) -> str:
    """The message of the operating system or file system, without the prefixes of libraries."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    text = str(error).split("Detail:")[-1].strip().split("\n")[0]
    return re.sub(r"^\[errno \d+\]", "", text, flags=re.IGNORECASE).strip(" .")


def holds_checkpoints(storage: Storage, name: str, *, resuming: bool, overwrite: bool) -> bool:
    """Return whether the folder ``name`` holds an older run's checkpoints, which must be removed before this run begins.

    Raises ConfigError if it holds them without ``overwrite``: a new run must not take another run's checkpoints for its own. Also
    raises ConfigError if the folder holds anything else, such as the data set.
    """
    if resuming:
        return False
    fs, root = open_filesystem(storage.path, storage.filesystem)
    entries = fs.get_file_info(pafs.FileSelector(f"{root.rstrip('/')}/{name}", allow_not_found=True))
    foreign = sorted(info.base_name for info in entries if not info.base_name.startswith(_RUNS_OWN))
    if foreign:
        raise ConfigError(
            f"{storage.path}/{name} is where the checkpoints of this run would go, and it holds other files "
            f"({', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}). Choose another "
            f"{argument('storage_path')}, or another name for the run directory."
        )
    if entries and not overwrite:
        raise ConfigError(
            f"{storage.path}/{name} holds the checkpoints of another run. Pass {argument('overwrite', True)} to remove them, "
            f"or choose another {argument('storage_path')} or {argument('run_dir')}."
        )
    return bool(entries)


def remove_checkpoints(storage: Storage, name: str) -> None:
    """Remove the folder that :func:`holds_checkpoints` found."""
    fs, root = open_filesystem(storage.path, storage.filesystem)
    fs.delete_dir(f"{root.rstrip('/')}/{name}")


def fetch(path: str, target: Path) -> None:
    """Copy one file of any storage to this machine. :attr:`offload.train.driver.trainer.Result.checkpoint` gives such paths."""
    fs, inner = open_filesystem(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    pafs.copy_files(inner, str(target.absolute()), source_filesystem=fs, destination_filesystem=pafs.LocalFileSystem())
