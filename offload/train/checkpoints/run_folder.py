"""The folder of a run's checkpoints, on any file system. The folder is the record: no list lies beside the checkpoints.

A checkpoint is a folder ``checkpoint_TIME``, in UTC, so that names sort by time. The run writes ``checksums.json`` last: a checkpoint
counts once that file is there and the other files have the lengths in it.
Where it stops: :mod:`offload.train.checkpoints.format` knows the content of the files, and :mod:`offload.train.checkpoints.retention`
which checkpoints stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow.fs as pafs

from offload.pipeline.sources.storage_paths import open_filesystem
from offload.train.checkpoints.retention import Entry
from offload.train.checkpoints.storage import CHECKSUMS_FILE, METRICS_FILE, MODEL_FILE, TRAINING_FILE, Storage

PREFIX = "checkpoint_"
OLD_LIST = "checkpoint_manager_snapshot.json"
"""Ray Train's list of a run's checkpoints, in folders of earlier versions. It alone holds the metrics of their checkpoints."""

TIME = "%Y-%m-%d_%H-%M-%S.%f"
PART = ".part"  # the suffix of a file that is being written
OWN_FILES = {MODEL_FILE, TRAINING_FILE, METRICS_FILE, CHECKSUMS_FILE, CHECKSUMS_FILE + PART}

CHUNK_BYTES = 64 << 20
ATTEMPTS = 3
PAUSE_S = 1.0  # pause before the second attempt; twice as long before the third
# Errors of S3 that pass. Arrow's client itself has retried by then.
PASSING = (
    "AWS Error SLOW_DOWN",
    "AWS Error INTERNAL_FAILURE",
    "AWS Error SERVICE_UNAVAILABLE",
    "AWS Error NETWORK_CONNECTION",
    "AWS Error UNKNOWN",
)

State = Literal["whole", "damaged", "unfinished", "foreign"]

_OWN_NAME = re.compile(PREFIX + r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{1,6}")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A folder among the checkpoints of a run.

    Args:
        name: its name.
        files: the names of the files.
        state: ``whole``: it counts. ``damaged``: it was complete once, or another program is copying it. ``unfinished``: a run began to
            write it. ``foreign``: it does not count, and other programs may have written it, or other versions of this one.
    """

    name: str
    files: frozenset[str]
    state: State


class RunFolder:
    """The checkpoints of the run ``name`` in a storage. Methods raise OSError, or what the client of an fsspec file system raises."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name

    @cached_property
    def _place(self) -> tuple[pafs.FileSystem, str]:
        fs, root = open_filesystem(self._storage.path, self._storage.filesystem)
        return fs, f"{root.rstrip('/')}/{self._name}"

    @property
    def fs(self) -> pafs.FileSystem:
        """The file system."""
        return self._place[0]

    @property
    def path(self) -> str:
        """The path of the folder on its file system."""
        return self._place[1]

    def path_of(self, name: str) -> str:
        """The path of a checkpoint on the file system."""
        return f"{self.path}/{name}"

    def address_of(self, name: str) -> str:
        """The path of a checkpoint, with its scheme if it is not local."""
        kind, path = str(self.fs.type_name), self.path_of(name)
        if kind in ("s3", "gcs", "abfs", "hdfs"):
            return f"{kind}://{path}"
        inner = _of_fsspec(self.fs)
        return path if inner is None or "file" in inner.protocol else str(inner.unstrip_protocol(path))

    # -- reading ---------------------------------------------------------------------------------------------------

    def look(self) -> list[Found]:
        """List the folders of checkpoints, oldest first."""
        inner = _of_fsspec(self.fs)
        if hasattr(inner, "invalidate_cache"):  # another process may have written since the last listing
            inner.invalidate_cache()
        base = self.path.strip("/")
        sizes: dict[str, dict[str, int | None]] = {}
        for info in self.fs.get_file_info(pafs.FileSelector(self.path, recursive=True, allow_not_found=True)):
            name, _, file = info.path.strip("/")[len(base) + 1 :].partition("/")
            is_file = info.type == pafs.FileType.File
            if name.startswith(PREFIX) and (file or not is_file):
                files = sizes.setdefault(name, {})
                if file:
                    files[file] = info.size if is_file else None
        return [self._found(name, sizes[name]) for name in sorted(sizes)]

    def whole(self) -> list[str]:
        """The names of the complete checkpoints, oldest first."""
        return [found.name for found in self.look() if found.state == "whole"]

    def entries(self, looked: Sequence[Found] | None = None) -> list[Entry]:
        """The complete checkpoints with their metrics, oldest first. ``looked``: what :meth:`look` returned."""
        whole = [found for found in (self.look() if looked is None else looked) if found.state == "whole"]
        without = any(METRICS_FILE not in found.files for found in whole)
        old = self._old_metrics() if without else {}
        return [Entry(name=found.name, metrics=self._metrics(found, old)) for found in whole]

    def _found(self, name: str, sizes: Mapping[str, int | None]) -> Found:
        state: State = "foreign"
        if _time_of(name) is not None:
            if CHECKSUMS_FILE in sizes and self._fits(name, sizes):
                state = "whole"
            # Only what holds nothing but our own files may be removed later.
            elif sizes.keys() <= OWN_FILES:
                state = "damaged" if CHECKSUMS_FILE in sizes else "unfinished"
        return Found(name=name, files=frozenset(sizes), state=state)

    def _fits(self, name: str, sizes: Mapping[str, int | None]) -> bool:
        """Return whether the files have the lengths that the run wrote."""
        written = self._document(f"{name}/{CHECKSUMS_FILE}")
        if not isinstance(written, dict):
            return False
        return all(
            isinstance(each, dict) and sizes.get(file, -1) == each.get("bytes") for file, each in written.items()
        )

    def _metrics(self, found: Found, old: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        if METRICS_FILE not in found.files:
            return old.get(found.name, {})
        metrics = self._document(f"{found.name}/{METRICS_FILE}")
        return metrics if isinstance(metrics, dict) else {}

    def _old_metrics(self) -> dict[str, Mapping[str, Any]]:
        """The metrics in Ray Train's list, by checkpoint. A list that is damaged has none."""
        listed = self._document(OLD_LIST)
        results = listed.get("checkpoint_results") if isinstance(listed, dict) else None
        metrics: dict[str, Mapping[str, Any]] = {}
        for each in results if isinstance(results, list) else []:
            if isinstance(each, dict) and isinstance(each.get("metrics"), dict):
                metrics[str(each.get("checkpoint_dir_name"))] = each["metrics"]
        return metrics

    def _document(self, inner: str) -> Any:
        """The content of a JSON file; None if it is missing or is no JSON."""
        try:
            with self.fs.open_input_stream(f"{self.path}/{inner}") as stream:
                return json.loads(stream.read())
        except (FileNotFoundError, ValueError):
            return None

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, name: str, files: Path) -> None:
        """Copy a checkpoint's files from a local folder. It counts once this returns."""
        self.fs.create_dir(self.path_of(name), recursive=True)
        # The checksums last: a checkpoint counts once they are there.
        for file in sorted((path.name for path in files.iterdir()), key=lambda file: file == CHECKSUMS_FILE):
            persistent(partial(self._copy, pafs.LocalFileSystem(), str(files / file), f"{name}/{file}"))

    def copy(self, source: RunFolder, entry: Entry) -> None:
        """Copy a complete checkpoint from another folder, with its metrics. It counts once this returns."""
        theirs = source.path_of(entry.name)
        infos = source.fs.get_file_info(pafs.FileSelector(theirs))
        names = [info.base_name for info in infos if info.type == pafs.FileType.File]
        self.fs.create_dir(self.path_of(entry.name), recursive=True)
        if METRICS_FILE not in names:  # Ray Train's list holds them
            with self.fs.open_output_stream(f"{self.path_of(entry.name)}/{METRICS_FILE}") as stream:
                stream.write(json.dumps(dict(entry.metrics)).encode())
        for file in sorted(names, key=lambda file: file == CHECKSUMS_FILE):
            self._copy(source.fs, f"{theirs}/{file}", f"{entry.name}/{file}")

    def remove(self, name: str) -> None:
        """Remove a checkpoint. From the first moment on, it no longer counts."""
        with contextlib.suppress(FileNotFoundError):
            if self.fs.get_file_info(f"{self.path_of(name)}/{CHECKSUMS_FILE}").type == pafs.FileType.File:
                # First of all: a folder that is half removed must not look like a checkpoint.
                self.fs.delete_file(f"{self.path_of(name)}/{CHECKSUMS_FILE}")
            self.fs.delete_dir(self.path_of(name))

    def _copy(self, fs: pafs.FileSystem, source: str, inner: str) -> None:
        target = f"{self.path}/{inner}"
        # A file of a local disk gets its name once it is complete; an object of a store exists only then.
        renamed = isinstance(self.fs, pafs.LocalFileSystem) and inner.endswith(CHECKSUMS_FILE)
        pafs.copy_files(
            source,
            target + PART if renamed else target,
            source_filesystem=fs,
            destination_filesystem=self.fs,
            chunk_size=CHUNK_BYTES,
            use_threads=not isinstance(self.fs, pafs.S3FileSystem),  # Arrow's threads may wait for each other there
        )
        if renamed:
            os.replace(target + PART, target)


def new_name(existing: Sequence[str], now: datetime | None = None) -> str:
    """The name of a new checkpoint. It sorts behind those that exist, even if a clock went back. Earlier versions took the local time."""
    times = [at for at in map(_time_of, existing) if at is not None]
    at = (now or datetime.now(UTC)).replace(tzinfo=None)
    return PREFIX + max([at, *(before + timedelta(microseconds=1) for before in times)]).strftime(TIME)


def _time_of(name: str) -> datetime | None:
    """The time in a checkpoint's name; None for the name of another folder, such as ``checkpoint_best``, a copy that a user made."""
    if _OWN_NAME.fullmatch(name) is None:
        return None
    try:
        return datetime.strptime(name.removeprefix(PREFIX), TIME)
    except ValueError:
        return None


def persistent(call: Callable[[], _Result]) -> _Result:
    """Return the result of a call to a storage, which may fail at first."""
    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except OSError as error:
            if not any(words in str(error) for words in PASSING):
                raise
            time.sleep(attempt * PAUSE_S)
    return call()


def _of_fsspec(fs: pafs.FileSystem) -> Any:
    """The fsspec file system behind this one; None if there is none."""
    return getattr(getattr(fs, "handler", None), "fs", None)
