"""The version of a file on storage: a number that changes with its size, its time of modification, or its ETag.

A listing finds the versions of remote files, so that reading one from a cache takes no request. A run thus reads remote files as they were
when it listed them. The version of a local or mounted file is looked up with every read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import time
from typing import Any, NamedTuple

import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.aside import each_aside

SETTLED_S = 2.0  # a file that changed later than this before a look may change again without a new time of modification
_TAGS = ("ETag", "etag", "md5Hash", "content_md5")  # as fsspec's file systems call them
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified")


class FileState(NamedTuple):
    """A file's size and version."""

    size: int
    version: int


class Versions:
    """The versions of remote files at the time of a listing.

    A file that changed just before may change again without a new time, so its version is salted: it only holds for this run.
    """

    def __init__(self, fs: pafs.FileSystem) -> None:
        self._fs, self._began, self._salt = fs, time.time(), secrets.token_hex(8)

    def of(self, info: pafs.FileInfo) -> int:
        """The version of a listed file. Raises ConfigError if the storage tells neither time of modification nor ETag."""
        modified: int | None = info.mtime_ns
        if modified is None:
            tag, modified = _foreign(self._fs, info.path)
            if tag is not None:
                return _hash(info.size, tag)
        if modified is None:
            raise ConfigError(
                f"cache= needs storage that tells when a file has changed, and {self._fs.type_name} tells no time of modification of "
                f"{info.path!r}. Drop cache=, or read the files through another file system."
            )
        unsettled = modified / 1e9 > self._began - SETTLED_S
        return _hash(info.size, modified, self._salt if unsettled else "")


def seen_files(fs: pafs.FileSystem, paths: list[str], threads: int) -> dict[str, FileState]:
    """The sizes and versions of remote files. Empty for local files, which are looked up when they are read.

    Raises OSError, and ConfigError as :meth:`Versions.of` does.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        return {}
    states: dict[str, FileState] = {}
    versions = Versions(fs)

    def look(path: str) -> tuple[str, FileState]:
        info = fs.get_file_info(path)
        return path, FileState(info.size or 0, versions.of(info))

    each_aside(look, paths, threads=threads, done=lambda state: states.update([state]))
    return states


def look_at(path: str) -> FileState | None:
    """A local file's size and version now. None if they may change without a trace, or the file cannot be found."""
    try:
        now = os.stat(path)
    except OSError:
        return None
    if now.st_mtime > time.time() - SETTLED_S:
        return None
    return FileState(now.st_size, _hash(now.st_size, now.st_mtime_ns))


def storage_name(fs: pafs.FileSystem) -> str:
    """A name that tells this storage from another with the same paths. It holds no credentials."""
    if isinstance(fs, pafs.SubTreeFileSystem):
        return f"{storage_name(fs.base_fs)}|{fs.base_path}"
    if isinstance(fs, pafs.PyFileSystem):
        options = getattr(getattr(fs.handler, "fs", None), "storage_options", {})
        server = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
        return f"{fs.type_name}|{server or options.get('host') or ''}"
    server = ""
    with contextlib.suppress(AttributeError, IndexError, TypeError):  # its pickled form, which may change
        server = fs.__reduce__()[1][0].get("endpoint_override") or ""
    return f"{fs.type_name}|{server}"


def _foreign(fs: pafs.FileSystem, path: str) -> tuple[str | None, int | None]:
    """(ETag, modification time in ns) of a file on an fsspec file system. None for what that does not tell."""
    inner: Any = getattr(getattr(fs, "handler", None), "fs", None)
    known = inner.info(path) if hasattr(inner, "info") else {}
    tag = next((str(known[name]) for name in _TAGS if known.get(name)), None)
    when = next((known[name] for name in _TIMES if known.get(name)), None)
    if isinstance(when, str):
        with contextlib.suppress(ValueError):
            when = datetime.datetime.fromisoformat(when)
    if isinstance(when, datetime.datetime):
        when = when.timestamp()
    return tag, int(when * 1e9) if isinstance(when, int | float) else None


def _hash(*parts: object) -> int:
    """A signed 64-bit hash of these parts."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
