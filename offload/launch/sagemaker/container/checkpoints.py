"""Find a run's checkpoints, and copy the newest to the place where this job's workers write.

Workers on one GPU host write to the job's checkpoint folder, which the service keeps in S3; workers on several hosts write to S3
themselves. A run may go on with another number of hosts: training continues from the newest checkpoint of both places.
Where it stops: :mod:`offload.train.checkpoints.run_folder` knows which checkpoints are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.sources.storage_paths import open_filesystem
from offload.train.checkpoints.retention import Entry
from offload.train.checkpoints.run_folder import Found, RunFolder
from offload.train.checkpoints.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A place for checkpoints. ``name``: the name of a run's folder in it, unless the script names its runs itself."""

    uri: str
    name: str

    def folders(self) -> dict[str, Folder]:
        """The folders of checkpoints by name. Raises OSError if they cannot be listed."""
        fs, root = open_filesystem(self.uri)
        entries = fs.get_file_info(pafs.FileSelector(root.rstrip("/"), allow_not_found=True))
        names = [info.base_name for info in entries if info.type == pafs.FileType.Directory]
        folders = {name: self.folder(name) for name in names}
        return {name: folder for name, folder in folders.items() if folder.found}

    def folder(self, name: str) -> Folder:
        """One folder, which may not exist."""
        run = RunFolder(Storage(path=self.uri), name)
        return Folder(run=run, found=tuple(each for each in run.look() if each.state != "foreign"))


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The checkpoints of one run.

    Args:
        run: the folder.
        found: all checkpoints in it, oldest first.
    """

    run: RunFolder
    found: tuple[Found, ...]

    @property
    def usable(self) -> list[str]:
        """The names of the checkpoints from which training can resume, oldest first."""
        return [found.name for found in self.found if found.state == "whole"]


def bring_newest(source: Shelf, target: Shelf) -> Iterator[str]:
    """Copy newer checkpoints from ``source`` to ``target``, and remove those that they replace. Yield a sentence for each copy.

    It repeats an incomplete copy.

    Raises OSError if ``source`` cannot be read, ConfigError if a copy fails.
    """
    for name, theirs in source.folders().items():
        ours = target.folder(target.name if name == source.name else name)
        newest = ours.usable[-1] if ours.usable else ""
        newer = [entry for entry in theirs.run.entries(theirs.found) if entry.name > newest]
        if not newer:
            continue
        yield f"the newest checkpoint, {newer[-1].name}, is in {source.uri}: copying it to {target.uri}"
        try:
            _copy(theirs, ours, newer)
        except OSError as error:
            raise ConfigError(
                f"the checkpoint {newer[-1].name} in {source.uri} cannot be copied to {target.uri}: {error}"
            ) from None


def _copy(theirs: Folder, ours: Folder, newer: Sequence[Entry]) -> None:
    there = {found.name for found in ours.found}
    for entry in newer:
        if entry.name in there:
            ours.run.remove(entry.name)  # an incomplete copy
        ours.run.copy(theirs.run, entry)
    for name in there.difference(theirs.usable):
        ours.run.remove(name)
