"""Paths of every kind behind one interface: local, ``s3://``, ``gs://``, and any scheme that fsspec knows."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.aside import each_aside
from offload.pipeline.sources.base import Tell, silent
from offload.pipeline.sources.listing_cache import cache, cached, remove_unused

SEVERAL = 16  # number of folders from which on parallel listing pays
LISTING_THREADS = 8
LOCAL_THREADS, REMOTE_THREADS = 4, 32  # that read small parts of many files
WORTH_CACHING = 10_000  # files
SETTLED_S = (
    2.0  # a folder that changed later than this before its listing may change again without a new time of modification
)

_OPTIONS = re.compile(r"\?[A-Za-z_]+=[^?]*$")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")

Path = str | os.PathLike[str]


def open_filesystem(path: Path, filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """The file system of a path, and the path on it.

    ``filesystem`` may be a pyarrow or fsspec file system; without it, the path's scheme decides. Raises ConfigError for an
    unknown scheme.
    """
    text = os.fspath(path)
    if filesystem is not None:
        if isinstance(filesystem, pafs.FileSystem):
            return filesystem, text.split("://", 1)[-1]
        if not hasattr(filesystem, "_strip_protocol"):
            raise ConfigError(f"filesystem must be a pyarrow or fsspec file system, found {type(filesystem).__name__}.")
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), str(filesystem._strip_protocol(text))
    if "://" not in text:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(text))
    scheme = text.split("://", 1)[0]
    try:
        if scheme in {"s3", "gs", "gcs", "file", "hdfs", "abfs", "abfss"}:
            return pafs.FileSystem.from_uri(_escaped(text))  # type: ignore[no-any-return]
        import fsspec

        handler, inner = fsspec.core.url_to_fs(text)
    except (ValueError, ImportError, OSError, pa.ArrowException) as error:
        first = str(error).split("\n")[0]
        raise ConfigError(
            f"cannot open {text!r}: {first}. Use a local path, s3://, gs://, a scheme that fsspec knows (its package may "
            "be missing), or pass filesystem=."
        ) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(handler)), inner


def _escaped(uri: str) -> str:
    """The URI with escapes for what a path may hold and a URI may not, such as spaces, ``#`` and ``[``. Its own escapes (``%20``) and its
    options (``?region=us-east-1``) stay."""
    scheme, rest = uri.split("://", 1)
    options = _OPTIONS.search(rest)
    place = rest[: options.start()] if options else rest
    host, slash, path = place.partition("/")
    escaped = quote(_LONE_PERCENT.sub("%25", path), safe="/:@%", errors="surrogateescape")
    return f"{scheme}://{host}{slash}{escaped}{options.group() if options else ''}"


def printable(path: str) -> str:
    """The path with ``\\xff`` for each byte that is no text, since names of files need not be text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def check_text(paths: Iterable[str]) -> None:
    """Raise ConfigError for a path that is no text, which Arrow cannot open."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the name of '{printable(path)}' is not UTF-8. Rename it.") from None


def requests_at_once(fs: pafs.FileSystem) -> int:
    """The number of threads that read small parts of many files."""
    if isinstance(fs, pafs.PyFileSystem):
        return 1  # fsspec's file systems hold locks of their own, and some do not support threads
    return LOCAL_THREADS if isinstance(fs, pafs.LocalFileSystem) else REMOTE_THREADS


def list_files(
    path: Path,
    filesystem: Any = None,
    tell: Tell = silent,
    note: Callable[[pafs.FileSystem, pafs.FileInfo], None] | None = None,
) -> tuple[pafs.FileSystem, str, list[str]]:
    """All files below a folder, sorted by path: (file system, the folder on it, paths on it).

    ``note`` gets what remote storage tells of each file. Raises ConfigError if the folder is missing, is a file, or is not readable.
    """
    fs, root = open_filesystem(path, filesystem)
    root = root.rstrip("/")
    if isinstance(fs, pafs.LocalFileSystem):
        return fs, root, _list_local(root, tell)
    try:
        info = fs.get_file_info(root)
        if info.type == pafs.FileType.NotFound:
            raise ConfigError(f"{os.fspath(path)!r} does not exist. Check the path and the bucket's name.")
        files = _list_remote(fs, root, tell, note)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"cannot list {os.fspath(path)!r}: {error}. Check the credentials, the region and the path."
        ) from None
    return fs, root, sorted(f for f in files if not _is_hidden(f[len(root) + 1 :]))


def _list_remote(
    fs: pafs.FileSystem, root: str, tell: Tell, note: Callable[[pafs.FileSystem, pafs.FileInfo], None] | None
) -> list[str]:
    """All files below a folder. Storage lists a folder page by page, so this lists several folders at once."""
    files: list[str] = []
    folders = [root]

    def add(found: list[pafs.FileInfo]) -> None:
        for info in found:
            if info.type == pafs.FileType.File:
                files.append(info.path)
                if note is not None:
                    note(fs, info)
        tell(f"{len(files):,} files")

    while 0 < len(folders) < SEVERAL:
        found = fs.get_file_info(pafs.FileSelector(folders.pop(0)))
        folders += [info.path for info in found if info.type == pafs.FileType.Directory]
        add(found)

    def below(folder: str) -> list[pafs.FileInfo]:
        return fs.get_file_info(pafs.FileSelector(folder, recursive=True))  # type: ignore[no-any-return]

    folders = [folder for folder in folders if not _is_hidden(folder[len(root) + 1 :])]
    # fsspec's file systems hold locks of their own, and some do not support threads.
    each_aside(below, folders, threads=1 if isinstance(fs, pafs.PyFileSystem) else LISTING_THREADS, done=add)
    return files


def _is_hidden(path: str) -> bool:
    """Whether the name of a file, or of a folder on its path, begins with a dot (``.ipynb_checkpoints``, ``._a.jpg``)."""
    return any(part.startswith(".") for part in path.split("/"))


def _list_local(root: str, tell: Tell) -> list[str]:
    try:
        os.stat(root)
    except FileNotFoundError:
        raise ConfigError(
            f"{root!r} does not exist. Check the path; this command looks it up on its own machine."
        ) from None
    except OSError as error:
        raise _cannot_list(error) from None
    if not os.path.isdir(root):
        raise ConfigError(f"{root!r} is a file, not a folder.")
    known = ("files below", os.path.abspath(root))
    if (earlier := _still_right(cached(known))) is not None:
        tell(f"{len(earlier):,} files")
        return earlier
    found: list[str] = []
    visited: list[str] = []
    began = time.time()

    def refuse(error: OSError) -> None:
        raise _cannot_list(error)

    # Class folders are often links to a larger data set.
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        folders[:] = [n for n in folders if not n.startswith(".") and not _leads_back(os.path.join(folder, n))]
        found += [os.path.join(folder, name) for name in files if not name.startswith(".")]
        visited.append(folder)
        tell(f"{len(found):,} files")
    found.sort()
    if len(found) >= WORTH_CACHING:
        modified = {folder: os.stat(folder).st_mtime_ns for folder in visited}
        if max(modified.values()) < (began - SETTLED_S) * 1e9:
            cache(known, _listing(found, modified))
            remove_unused()
    return found


def _listing(files: list[str], modified: Mapping[str, int]) -> pa.Table:
    """Files, with the times at which their folders were modified. Names that are no text (b"\\xff.jpg") survive as bytes."""
    folders = json.dumps({os.fsencode(folder).hex(): at for folder, at in modified.items()})
    table = pa.table({"path": pa.array(map(os.fsencode, files), pa.large_binary())})
    return table.replace_schema_metadata({"folders": folders})


def _still_right(listing: pa.Table | None) -> list[str] | None:
    """The files of an earlier listing, if no folder has changed since then."""
    if listing is None:
        return None
    try:
        folders = json.loads(listing.schema.metadata[b"folders"])
        for folder, at in folders.items():
            if os.stat(bytes.fromhex(folder)).st_mtime_ns != at:
                return None
    except OSError:
        return None
    return [os.fsdecode(path) for path in listing["path"].to_pylist()]


def _leads_back(folder: str) -> bool:
    """Whether this folder is a link to one of its parents."""
    if not os.path.islink(folder):
        return False
    target, here = os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))
    return os.path.commonpath((target, here)) == target


def _cannot_list(error: OSError) -> ConfigError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"no permission to read {error.filename!r}. Run as a user with access, or give this user access (chmod, chown)."
        )
    return ConfigError(f"cannot list {error.filename!r}: {error.strerror}.")


def read_file(fs: pafs.FileSystem, path: str) -> bytes:
    """Read a whole file. Raises OSError."""
    if isinstance(fs, pafs.LocalFileSystem):
        with open(path, "rb") as file:
            return file.read()
    if (inner := _of_fsspec(fs)) is not None:
        # s3fs would first ask for the size, to read several parts at once.
        options = {"max_concurrency": 1} if hasattr(inner, "max_concurrency") else {}
        return bytes(inner.cat_file(path, **options))
    with fs.open_input_file(path) as stream:
        return bytes(stream.read())


def read_part(fs: pafs.FileSystem, path: str, offset: int, size: int) -> bytes:
    """Read a part of a file, or what there is of it. Raises OSError."""
    if (inner := _of_fsspec(fs)) is not None:
        content = bytes(inner.cat_file(path, start=offset, end=offset + size))
        # A server of HTTP may ignore a range and send the whole file.
        return content if len(content) <= size else content[offset : offset + size]
    with fs.open_input_file(path) as stream:
        return bytes(stream.read_at(size, offset))


def _of_fsspec(fs: pafs.FileSystem) -> Any:
    """The file system of fsspec behind this one, which reads a file in one request; None if there is none. Its streams first ask for the
    file's size, and then read more than they need."""
    return getattr(fs.handler, "fs", None) if isinstance(fs, pafs.PyFileSystem) else None
