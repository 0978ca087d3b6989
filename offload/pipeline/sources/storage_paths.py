"""Paths of every kind behind one interface: local, ``s3://``, ``gs://``, and any scheme that fsspec knows."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.index.listing_cache import cache, cached, remove_unused
from offload.pipeline.index.source import Tell, silent
from offload.pipeline.sources.walking import HandOver, walk_local, walk_remote

LOCAL_THREADS, REMOTE_THREADS = 4, 32  # for reading small parts of many files
WORTH_CACHING = 10_000  # files
SETTLED_S = 2.0
"""A folder that changed this shortly before its listing may change again without a new modification time."""

_OPTIONS = re.compile(r"\?[A-Za-z_]+=[^?]*$")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")

PathLike = str | os.PathLike[str]


def open_filesystem(path: PathLike, filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """The file system of a path, and the path on it.

    ``filesystem`` may be a pyarrow or fsspec file system; without it, the path's scheme decides. Raises ConfigError for an
    unknown scheme.
    """
    text = os.fspath(path)
    if filesystem is not None:
        if isinstance(filesystem, pafs.FileSystem):
            inner = text.split("://", 1)[-1]
            # Processes of other nodes have another working directory.
            return filesystem, _absolute(inner) if isinstance(filesystem, pafs.LocalFileSystem) else inner
        if not hasattr(filesystem, "_strip_protocol"):
            raise ConfigError(f"filesystem must be a pyarrow or fsspec file system, found {type(filesystem).__name__}.")
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), str(filesystem._strip_protocol(text))
    if "://" not in text:
        return pafs.LocalFileSystem(), _absolute(text)
    scheme = text.split("://", 1)[0]
    try:
        if scheme in {"s3", "gs", "gcs", "file", "hdfs", "abfs", "abfss"}:
            return pafs.FileSystem.from_uri(escaped(text))  # type: ignore[no-any-return]
        import fsspec

        handler, inner = fsspec.core.url_to_fs(text)
    except (ValueError, ImportError, OSError, pa.ArrowException) as error:
        first = str(error).split("\n")[0]
        raise ConfigError(
            f"cannot open {text!r}: {first}. Use a local path, s3://, gs://, a scheme that fsspec knows (its package may "
            "be missing), or pass filesystem=."
        ) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(handler)), inner


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def escaped(uri: str) -> str:
    """The URI with escapes for characters that a path may hold and a URI may not, such as spaces, ``#`` and ``[``.

    Its own escapes (``%20``) and its options (``?region=us-east-1``) stay.
    """
    scheme, rest = uri.split("://", 1)
    options = _OPTIONS.search(rest)
    place = rest[: options.start()] if options else rest
    host, slash, path = place.partition("/")
    quoted = quote(_LONE_PERCENT.sub("%25", path), safe="/:@%", errors="surrogateescape")
    return f"{scheme}://{host}{slash}{quoted}{options.group() if options else ''}"


def printable(path: str) -> str:
    """The path with ``\\xff`` for each byte that is not text, since file names need not be text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def check_text(paths: Iterable[str]) -> None:
    """Raise ConfigError for a path that is not UTF-8, since Arrow cannot open it."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the name of '{printable(path)}' is not UTF-8. Rename it.") from None


def requests_at_once(fs: pafs.FileSystem) -> int:
    """The number of threads for reading small parts of many files."""
    if isinstance(fs, pafs.PyFileSystem):
        return 1  # fsspec's file systems hold locks of their own, and some do not support threads
    return LOCAL_THREADS if isinstance(fs, pafs.LocalFileSystem) else REMOTE_THREADS


def open_folder(path: PathLike, filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """The file system of a folder, and the folder on it. Raises ConfigError if the folder is missing, is a file, or is not readable."""
    fs, root = open_filesystem(path, filesystem)
    root = root.rstrip("/")
    if not isinstance(fs, pafs.LocalFileSystem):
        with telling_errors(path):
            if fs.get_file_info(root).type == pafs.FileType.NotFound:
                raise ConfigError(f"{os.fspath(path)!r} does not exist. Check the path and the bucket's name.")
        return fs, root
    root = root or "/"
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
    return fs, root


def file_name(inner: str) -> str:
    """The name of a file on its file system, without the signature that may follow it in a URL."""
    return inner.rpartition("/")[2].partition("?")[0]


def is_folder(path: PathLike, fs: pafs.FileSystem, inner: str) -> bool:
    """Return whether ``path``, called ``inner`` on its file system, is a folder. Raises ConfigError if remote storage does not tell."""
    if isinstance(fs, pafs.LocalFileSystem):
        return os.path.isdir(inner)  # without permission it is False, and opening the file then says so
    return _is(pafs.FileType.Directory, path, fs, inner)


def is_file(path: PathLike, fs: pafs.FileSystem, inner: str) -> bool:
    """Return whether ``path``, called ``inner`` on its file system, is certainly a file.

    Raises ConfigError if remote storage does not tell.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        return os.path.isfile(inner)
    # fsspec calls everything on a web server a file, even a page that lists a folder.
    return "http" not in fs.type_name and _is(pafs.FileType.File, path, fs, inner)


def exists(path: PathLike, fs: pafs.FileSystem, inner: str) -> bool:
    """Return whether ``path``, called ``inner`` on its file system, certainly exists.

    Raises ConfigError if remote storage does not tell.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        return os.path.exists(inner)
    return "http" not in fs.type_name and not _is(pafs.FileType.NotFound, path, fs, inner)


def _is(kind: pafs.FileType, path: PathLike, fs: pafs.FileSystem, inner: str) -> bool:
    with telling_errors(path):
        return bool(fs.get_file_info(inner.rstrip("/")).type == kind)


@contextlib.contextmanager
def telling_errors(path: PathLike) -> Iterator[None]:
    """Raise errors of remote storage as ConfigErrors."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"cannot list {os.fspath(path)!r}: {error}. Check the credentials, the region and the path."
        ) from None


def list_files(path: PathLike, filesystem: Any = None, tell: Tell = silent) -> tuple[pafs.FileSystem, str, list[str]]:
    """All files below a folder, sorted by path: (file system, the folder on it, paths on it).

    Raises ConfigError if the folder is missing, is a file, or is not readable.
    """
    fs, root = open_folder(path, filesystem)
    files: list[str] = []

    def add(paths: list[str], infos: Sequence[pafs.FileInfo] | None) -> None:
        files.extend(paths)
        tell(f"{len(files):,} files")

    if not isinstance(fs, pafs.LocalFileSystem):
        with telling_errors(path):
            walk_remote(fs, root, add)
        return fs, root, files
    known = ("files below", root)
    if (earlier := cached(known, unchanged)) is not None:
        files = [os.fsdecode(path) for path in earlier["path"].to_pylist()]
        tell(f"{len(files):,} files")
        return fs, root, files
    folders = walk_settled(root, add)
    if folders is not None and len(files) >= WORTH_CACHING:
        # As bytes, names that are not text (b"\xff.jpg") survive.
        table = pa.table({"path": pa.array(map(os.fsencode, files), pa.large_binary())})
        cache(known, table.replace_schema_metadata({"folders": folders}))
        remove_unused()
    return fs, root, files


def walk_settled(root: str, hand_over: HandOver) -> str | None:
    """Hand over the files below a folder of this machine, and return its folders' modification times, for :func:`unchanged`.

    None if a folder may change again without a new time. Raises ConfigError if a folder cannot be read.
    """
    began = time.time()
    visited: list[str] = []
    try:
        walk_local(root, hand_over, visited.append)
        modified = {folder: os.stat(folder).st_mtime_ns for folder in visited}
    except OSError as error:
        raise _cannot_list(error) from None
    if max(modified.values()) >= (began - SETTLED_S) * 1e9:
        return None
    return json.dumps({os.fsencode(folder).hex(): at for folder, at in modified.items()})


def unchanged(facts: Mapping[str, Any]) -> bool:
    """Return whether no folder has changed since a listing with these facts."""
    try:
        return all(
            os.stat(bytes.fromhex(folder)).st_mtime_ns == at for folder, at in json.loads(facts["folders"]).items()
        )
    except OSError:
        return False


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
    if not size:
        return b""  # such as an empty member of a shard: no range of HTTP is empty, and obstore refuses one
    if (inner := _of_fsspec(fs)) is not None:
        content = bytes(inner.cat_file(path, start=offset, end=offset + size))
        # An HTTP server may ignore the range and send the whole file.
        return content if len(content) <= size else content[offset : offset + size]
    with fs.open_input_file(path) as stream:
        return bytes(stream.read_at(size, offset))


def _of_fsspec(fs: pafs.FileSystem) -> Any:
    """The fsspec file system behind this one, which reads a file in one request. None if there is none.

    fsspec's streams would first ask for the file's size, and then read more than they need.
    """
    return getattr(fs.handler, "fs", None) if isinstance(fs, pafs.PyFileSystem) else None


class Positioned(io.RawIOBase):
    """A file of a known size in bytes. A subclass reads at ``_at``, and moves it on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at
