"""Find a run's checkpoints, and copy the newest to the place where this job's workers write.

Workers on one GPU host write to the job's checkpoint folder, which the service keeps in S3; workers on several hosts write to S3
themselves. A run may go on with another number of hosts: training continues from the newest checkpoint of both places.
Where it stops: :mod:`offload.train.checkpoints.ray_list` reads Ray Train's list of a run's checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.sources.storage_paths import open_filesystem
from offload.train.checkpoints.ray_list import PREFIX, SNAPSHOT, is_whole, mended_snapshot


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A place for checkpoints. ``name``: the name of a run's folder in it, unless the script names its runs itself."""

    uri: str
    name: str

    def folders(self) -> dict[str, Folder]:
        """The folders of checkpoints by name. Raises OSError if they cannot be listed."""
        fs, root = open_filesystem(self.uri)
        entries = fs.get_file_info(pafs.FileSelector(root.rstrip("/"), allow_not_found=True))
        folders = {info.base_name: _folder(fs, info.path) for info in entries if info.type == pafs.FileType.Directory}
        return {name: folder for name, folder in folders.items() if folder.checkpoints}

    def folder(self, name: str) -> Folder:
        """One folder, which may not exist."""
        fs, root = open_filesystem(self.uri)
        return _folder(fs, f"{root.rstrip('/')}/{name}")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The checkpoints of one run.

    Args:
        checkpoints: the names of all checkpoints, oldest first.
        whole: the complete checkpoints.
        listed: Ray Train's list of the complete checkpoints; a list of all of them if Ray Train has no complete list.
    """

    fs: pafs.FileSystem
    path: str
    checkpoints: tuple[str, ...]
    whole: tuple[str, ...]
    listed: dict[str, Any]

    @property
    def usable(self) -> list[str]:
        """The checkpoints from which training can resume, oldest first: their names are their times."""
        return sorted(str(checkpoint["checkpoint_dir_name"]) for checkpoint in self.listed["checkpoint_results"])


def bring_newest(source: Shelf, target: Shelf) -> Iterator[str]:
    """Copy newer checkpoints from ``source`` to ``target``, and remove those that they replace. Yield a sentence for each copy.

    It repeats an incomplete copy: the list, written last, names only complete copies.

    Raises OSError if ``source`` cannot be read, ConfigError if a copy fails.
    """
    for name, theirs in source.folders().items():
        ours = target.folder(target.name if name == source.name else name)
        newest = ours.usable[-1] if ours.usable else ""
        newer = [name for name in theirs.usable if name > newest]
        if not newer:
            continue
        yield f"the newest checkpoint, {newer[-1]}, is in {source.uri}: copying it to {target.uri}"
        try:
            _copy(theirs, ours, newer)
        except OSError as error:
            raise ConfigError(
                f"the checkpoint {newer[-1]} in {source.uri} cannot be copied to {target.uri}: {error}"
            ) from None


def _copy(theirs: Folder, ours: Folder, names: list[str]) -> None:
    for name in names:
        if name in ours.checkpoints:
            ours.fs.delete_dir(f"{ours.path}/{name}")  # an incomplete copy
        ours.fs.create_dir(f"{ours.path}/{name}")
        pafs.copy_files(
            f"{theirs.path}/{name}", f"{ours.path}/{name}", source_filesystem=theirs.fs, destination_filesystem=ours.fs
        )
    with ours.fs.open_output_stream(f"{ours.path}/{SNAPSHOT}") as stream:
        stream.write(json.dumps(mended_snapshot(theirs.listed, names)).encode())
    for name in ours.checkpoints:
        if name not in names:
            ours.fs.delete_dir(f"{ours.path}/{name}")


def _folder(fs: pafs.FileSystem, path: str) -> Folder:
    entries = fs.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True))
    files = {info.path[len(path) + 1 :] for info in entries if info.type == pafs.FileType.File}
    names = sorted({name.split("/")[0] for name in files if name.startswith(PREFIX) and "/" in name})
    whole = [name for name in names if is_whole(fs, f"{path}/{name}")]
    snapshot = _document(fs, f"{path}/{SNAPSHOT}") if SNAPSHOT in files else None
    listed = mended_snapshot(snapshot if snapshot is not None and "checkpoint_results" in snapshot else None, whole)
    return Folder(fs=fs, path=path, checkpoints=tuple(names), whole=tuple(whole), listed=listed)


def _document(fs: pafs.FileSystem, path: str) -> dict[str, Any] | None:
    """A JSON file; None if it is incomplete."""
    with fs.open_input_stream(path) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
