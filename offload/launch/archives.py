"""Reproducible archives, in which the same files give the same bytes.

Where it stops: :mod:`offload.launch.uploaded_files` chooses the files to upload.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

from offload.launch.uploaded_files import bytes_of

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date that zip knows
_NEXT_DAY_S = 315_619_200  # since 1970: in no time zone before that date


def zipped(files: Mapping[str, Path]) -> bytes:
    """A zip archive of files, given by their names in it. Raises ConfigError if a file cannot be read."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = _mode(files[name]) << 16
            archive.writestr(member, bytes_of(files[name]))
    return buffer.getvalue()


def packed_sizes(archive: bytes) -> dict[str, int]:
    """The compressed size of each file in a zip archive, in bytes."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {member.filename: member.compress_size for member in opened.infolist()}


def unzipped(archive: bytes, folder: Path, without: Collection[str] = ()) -> None:
    """Write the files of an archive of :func:`zipped` to a folder, without those of these base names."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for member in opened.infolist():
            if Path(member.filename).name not in without:
                path = Path(opened.extract(member, folder))
                path.chmod(member.external_attr >> 16)


def tarred(files: Mapping[str, Path], texts: Mapping[str, str], private: Collection[str] = ()) -> bytes:
    """A tar.gz archive of files and texts, given by their names in it. Only the owner may read the ``private`` ones.

    Raises ConfigError if a file cannot be read.
    """
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name in sorted({*files, *texts}):
            content = texts[name].encode() if name in texts else bytes_of(files[name])
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mtime = _NEXT_DAY_S  # a script may zip what it finds
            member.mode = 0o600 if name in private else 0o644 if name in texts else _mode(files[name])
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _mode(path: Path) -> int:
    return 0o755 if os.access(path, os.X_OK) else 0o644
