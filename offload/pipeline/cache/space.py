"""Room in a cache: the files of its contents, the bytes that it uses, and how it makes room for more.

A content is a file that begins with its version, length and checksum. All processes of a node share the number of bytes in use.
Room comes from files of killed processes, from sources that nobody uses, and from contents that their source no longer has.
A lock on a file shows that its owner lives: the system releases it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_NUMBER = struct.Struct("<q")


class Ledger:
    """A number of bytes in a file. Read and change it only while it is held.

    Whoever adds bytes writes the number first, and whoever removes bytes writes it last. A process that is killed in between leaves a
    number that is too large, never one that is too small.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be written."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)
        self._lock = threading.Lock()  # a file lock belongs to the process, not to a thread
        with self.held():
            if os.fstat(self._fd).st_size != _NUMBER.size:
                self.used = 0  # on a full disk this fails now, and no later write needs space

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep all other threads and processes out."""
        with self._lock:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # inside the try, since a signal handler may raise right after it
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    @property
    def used(self) -> int:
        """The bytes in use."""
        return int(_NUMBER.unpack(os.pread(self._fd, _NUMBER.size, 0))[0])

    @used.setter
    def used(self, number: int) -> None:
        os.pwrite(self._fd, _NUMBER.pack(max(number, 0)), 0)


BLOCK = 4096
_HEADER = struct.Struct("<4sIqq")
_MAGIC = b"OFC1"  # the last character counts versions of the format


class DamagedError(Exception):
    """An entry is not what was written."""


def disk_bytes(file_bytes: int) -> int:
    """The bytes that a file of this size takes on disk."""
    return -(-file_bytes // BLOCK) * BLOCK


def entry_bytes(content_bytes: int) -> int:
    """The bytes that the entry of a content of this size takes on disk."""
    return disk_bytes(_HEADER.size + content_bytes)


def write(fd: int, version: int, content: bytes) -> None:
    """Write an entry. Raises OSError."""
    left = memoryview(_HEADER.pack(_MAGIC, zlib.crc32(content), version, len(content)))
    for part in (left, memoryview(content)):
        while part:
            part = part[os.write(fd, part) :]


def read(path: str) -> tuple[int, bytes, float]:
    """The version and the content of an entry, and the time of its last use.

    Raises DamagedError, and OSError if there is no such entry.
    """
    with open(path, "rb", buffering=0) as file:
        header, content = file.read(_HEADER.size), file.readall()
        used = os.fstat(file.fileno()).st_mtime
    if len(header) < _HEADER.size:
        raise DamagedError
    magic, checksum, version, size = _HEADER.unpack(header)
    # A disk may lose what was written last when the machine loses its power.
    if magic != _MAGIC or size != len(content) or zlib.crc32(content) != checksum:
        raise DamagedError
    return version, content, used


NEW, BUSY, SOURCES = "new", "busy", "sources"
"""Folders: files being written, locks for contents being read from storage, and contents by source."""
USERS, SWEEP, SEARCHED = "users", "sweep", "searched"
"""Files: the lock that all users share, the lock of the process that makes room, and the time of a source's last search."""
SEARCH_S = 600.0  # time between two searches of a source, each of which looks at all its contents
_BATCH = 128  # files removed at once, while nobody else can store


def open_lock(path: str | Path) -> int:
    """The descriptor of a file to lock. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def locked(fd: int) -> bool:
    """Lock a file for this process alone, if nobody else has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tidy(folder: Path, ledger: Ledger, limit_bytes: int) -> None:
    """Remove files of killed processes, recount, and enforce the limit. Only while nobody else uses the folder."""
    _reclaim(folder, ledger)  # other threads of this process may already hold locks
    sources = [source.path for source in _entries(folder / SOURCES)]
    used = sum(disk_bytes(file.stat().st_size) for source in sources for file in _contents(source))
    with ledger.held():
        ledger.used = used
    if used > limit_bytes:  # an earlier run had a larger one
        oldest = sorted((file.stat().st_mtime, file.path) for source in sources for file in _contents(source))
        remove(ledger, (path for _, path in oldest), wanted=used - limit_bytes, at_once=1)


def make(folder: Path, ledger: Ledger, wanted: int, *, own: Path, own_unused_since: float | None) -> bool:
    """Make room for ``wanted`` bytes. Return whether there is more room than before.

    Only one process does so at a time; others return at once. Raises OSError.

    Args:
        own: the caller's source. Its contents stay, except those unused since ``own_unused_since``. None: all stay.
    """
    fd = open_lock(folder / SWEEP)
    try:
        if not locked(fd):
            return False
        freed = _reclaim(folder, ledger)
        other_sources = [Path(entry.path) for entry in _entries(folder / SOURCES) if entry.path != str(own)]
        # The source whose last use is longest ago goes first.
        for source in sorted(other_sources, key=_last_use):
            if freed < wanted:
                freed += _evict(source, ledger, wanted - freed)
        if freed < wanted and own_unused_since is not None and _may_search(own):
            paths = (entry.path for entry in _contents(own))
            freed += remove(ledger, paths, unused_since=own_unused_since, wanted=wanted - freed)
        return freed > 0
    finally:
        os.close(fd)


def remove(
    ledger: Ledger,
    paths: Iterable[str],
    *,
    unused_since: float | None = None,
    wanted: int | None = None,
    at_once: int = _BATCH,
) -> int:
    """Remove contents until ``wanted`` bytes are free. Return the bytes freed. Raises OSError.

    Args:
        unused_since: remove only contents unused since this time. None: remove any.
        wanted: the bytes to free. None: remove all of ``paths``.
        at_once: the files to remove while the ledger is held.
    """
    freed = 0
    remaining = iter(paths)
    while (wanted is None or freed < wanted) and (batch := list(itertools.islice(remaining, at_once))):
        with ledger.held():
            gone = 0
            for path in batch:
                with contextlib.suppress(FileNotFoundError):
                    known = os.stat(path)
                    # Looked at again under the lock: it may have been used since it was listed.
                    if unused_since is None or known.st_mtime < unused_since:
                        os.unlink(path)
                        gone += disk_bytes(known.st_size)
            ledger.used -= gone
        freed += gone
    return freed


def _evict(source: Path, ledger: Ledger, wanted: int) -> int:
    """Remove contents of a source, if nobody uses it."""
    fd = open_lock(source / USERS)
    try:
        return remove(ledger, (entry.path for entry in _contents(source)), wanted=wanted) if locked(fd) else 0
    finally:
        os.close(fd)


def _reclaim(folder: Path, ledger: Ledger) -> int:
    """Remove files that killed processes were writing, and their locks. Return the bytes freed."""
    freed = 0
    for path in itertools.chain(_files(folder / NEW), _files(folder / BUSY)):
        with ledger.held(), contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if locked(fd):
                    os.unlink(path)
                    # The name holds the reserved bytes, which count although nothing may be written yet.
                    head, dash, _ = os.path.basename(path).partition("-")
                    size = int(head) if dash else 0  # locks hold nothing
                    ledger.used -= size
                    freed += size
            finally:
                os.close(fd)
    return freed


def _may_search(source: Path) -> bool:
    """Return whether the last search of a source was long ago. If so, note this one."""
    path = source / SEARCHED
    with contextlib.suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime < SEARCH_S:
            return False
    path.touch(mode=0o600)
    return True


def _last_use(source: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return (source / USERS).stat().st_mtime
    return 0.0


def _contents(source: str | Path) -> Iterator[os.DirEntry[str]]:
    for folder in _entries(source):
        if folder.is_dir(follow_symlinks=False):
            yield from _entries(folder.path)


def _files(folder: Path) -> list[str]:
    return [entry.path for entry in _entries(folder)]


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return list(entries)
    return []
