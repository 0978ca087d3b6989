"""Read a checkpoint of any file system as a local one. Processes of one user on a node share the copy of a remote one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyarrow.fs as pafs

from offload.preload.python import own_folder


@contextlib.contextmanager
def local_copy(fs: pafs.FileSystem, path: str) -> Iterator[Path]:
    """A context in which the folder or file ``path`` of a file system is a local one. The last process that leaves it removes the copy.

    Raises OSError if it cannot be read.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        yield Path(path)
        return
    name = hashlib.sha256(f"{fs.type_name}\0{path}".encode()).hexdigest()[:24]
    copy = Path(own_folder(), f"copy-{name}")
    copying = copy.with_suffix(".copying")
    with _locked(copy.with_suffix(".lock")) as lock:
        # Nobody removes the copy while this process holds the shared lock. Who copies holds a lock of its own, so that nobody has to wait
        # for those that read already: they may be waiting for this process.
        try:
            if not copy.exists():
                with open(copying, "a", encoding="ascii") as alone:
                    fcntl.flock(alone, fcntl.LOCK_EX)
                    if not copy.exists():
                        _download(fs, path, copy)
            yield copy / _name(path)
        finally:
            with contextlib.suppress(BlockingIOError):  # others still read it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(lock, Path(lock.name)):  # else another process removed all, and the next ones may have begun
                    shutil.rmtree(copy, ignore_errors=True)
                    copying.unlink(missing_ok=True)
                    os.unlink(lock.name)


def _download(fs: pafs.FileSystem, path: str, copy: Path) -> None:
    """Copy the folder or file into the folder ``copy``. Nobody sees half of it."""
    partial = tempfile.mkdtemp(dir=copy.parent, prefix=f"{copy.name}-")
    try:
        target = Path(partial, _name(path))
        if fs.get_file_info(path).type == pafs.FileType.Directory:
            target.mkdir(exist_ok=True)
        pafs.copy_files(path, str(target), source_filesystem=fs)
        os.rename(partial, copy)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """The file, with a shared lock on it. Whoever removes it holds the exclusive lock, so this opens it again if it is gone by then."""
    while True:
        with open(path, "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is(lock, path):
                yield lock
                return


def _is(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
