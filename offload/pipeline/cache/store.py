"""A cache in a folder of a node, which all preprocessing processes of the node share, and those of other runs too.

A content stays as long as its data set is in use: once the folder is full, new contents are not stored. A pass reads a data set from end to
end. Evicting the least recently used content would therefore evict each one just before its next use, without a single hit. Contents that
are not in use make room (:mod:`offload.pipeline.cache.space`).

Why not a library? diskcache's bound is soft and it keeps no part of a scan; fsspec's caches have no bound; neither detects damaged
contents.

Where it stops: :mod:`offload.pipeline.sources.cached_files` knows which file is read, and which version of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from offload.pipeline.cache import accounts, space
from offload.pipeline.cache.space import Ledger
from offload.pipeline.cache.spec import LEDGER, CacheSpec, make_folder

TOUCH_S = 3600.0  # time between two updates of a content's time of use
MARGIN_S = 1.0  # possible error of a file's time
SWEEP_S = 60.0  # time between two attempts of a process to make room


class Store:
    """The cache of this process in one folder.

    Contents belong to sources. Processes that use a source keep others from evicting its contents.
    """

    def __init__(self, spec: CacheSpec) -> None:
        """Raises OSError if the folder cannot be used."""
        make_folder(spec)
        self.folder, self.limit_bytes = spec.folder, spec.limit_bytes
        for name in (space.NEW, space.BUSY, space.SOURCES):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        self.began = time.time() - MARGIN_S
        self.stopped = self.full = False
        self.ledger = Ledger(self.folder / LEDGER)
        self._users = space.open_lock(self.folder / space.USERS)
        weakref.finalize(self, os.close, self._users)
        self._joined = threading.Event()
        self._next_sweep = 0.0
        # Aside, since tidying a large folder takes long. Contents may be read meanwhile.
        threading.Thread(target=self._join, daemon=True, name="cache").start()

    def source(self, name: str) -> CachedSource:
        """The contents of a source. Raises OSError."""
        return CachedSource(self, self.folder / space.SOURCES / name)

    def stop(self, error: OSError) -> None:
        """Stop storing. Stored contents may still be read."""
        if not self.stopped:
            self.stopped = True
            accounts.tell(f"{self.folder.parent}: {error.strerror or error}")

    def _join(self) -> None:
        """Join the folder's users. The first of them removes what killed processes have left."""
        try:
            if space.locked(self._users):
                space.tidy(self.folder, self.ledger, self.limit_bytes)
            # Held until the process ends: while any process holds it, nobody tidies.
            fcntl.flock(self._users, fcntl.LOCK_SH)
        except OSError as error:
            self.stop(error)
        self._joined.set()

    def joined(self) -> None:
        """Wait until the folder is tidy."""
        self._joined.wait()

    @property
    def tidy(self) -> bool:
        """Whether the folder is tidy, so that contents may be added and removed."""
        return self._joined.is_set() and not self.stopped

    def reserve(self, size: int, unused_in: CachedSource) -> tuple[str, int] | None:
        """Reserve ``size`` bytes on disk. Return the path and descriptor of a new file, or None if there is no room.

        ``unused_in``: the source that the content belongs to. Raises OSError.
        """
        if size > self.limit_bytes:
            return None
        reserved = self._reserved(size)
        if reserved is None and time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            # More than this content needs, so that the next ones find room without a search.
            wanted = max(size, self.limit_bytes // 100)
            since = self.began if unused_in.passed else None
            if space.make(self.folder, self.ledger, wanted, own=unused_in.folder, own_unused_since=since):
                reserved = self._reserved(size)
                self._next_sweep = 0.0
        self.full = reserved is None
        return reserved

    def _reserved(self, size: int) -> tuple[str, int] | None:
        with self.ledger.held():
            used = self.ledger.used
            if used + size > self.limit_bytes:
                return None
            path = f"{self.folder}/{space.NEW}/{size}-{secrets.token_hex(8)}"
            self.ledger.used = used + size
            try:
                fd = space.open_lock(path)
            except OSError:
                self.ledger.used = used
                raise
            fcntl.flock(fd, fcntl.LOCK_EX)  # shows others that the writer lives
            return path, fd

    def give_back(self, path: str, size: int) -> None:
        """Remove a reserved file."""
        with self.ledger.held(), contextlib.suppress(OSError):
            os.unlink(path)
            self.ledger.used -= size

    def commit(self, path: str, final: str) -> None:
        """Put a written file in its place, and forget the one that was there. Raises OSError."""
        with self.ledger.held():
            try:
                before = space.disk_bytes(os.stat(final).st_size)
            except FileNotFoundError:
                before = 0
                os.makedirs(os.path.dirname(final), mode=0o700, exist_ok=True)
            # At once: a reader finds the earlier content or the whole new one.
            os.rename(path, final)
            self.ledger.used -= before


class CachedSource:
    """The contents of one source, by key."""

    def __init__(self, store: Store, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder, self._store = folder, store
        self.passed = False
        """Whether this process has seen a whole pass over the source."""
        self._epochs: set[int] = set()
        users = space.open_lock(folder / space.USERS)
        weakref.finalize(self, os.close, users)
        fcntl.flock(users, fcntl.LOCK_SH)
        os.utime(folder / space.USERS)

    def begin(self, epoch: int) -> None:
        """Note that a task of this epoch begins."""
        if not self.passed:
            self._epochs.add(epoch)
            # The tasks of two epochs may alternate at the change from one to the next.
            self.passed = len(self._epochs) > 2

    def get(self, key: str, version: int) -> bytes | None:
        """The content of a key, if it is stored in this version."""
        path = self._path(key)
        try:
            stored, content, used = space.read(path)
        except FileNotFoundError:
            return None
        except (OSError, space.DamagedError):
            if self._store.tidy:
                with contextlib.suppress(OSError):
                    space.remove(self._store.ledger, [path])
            return None
        if stored != version:
            return None
        if used < max(self._store.began, time.time() - TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(path)
        return content

    def put(self, key: str, version: int, content: bytes) -> None:
        """Store a content, in place of an earlier version, if there is room."""
        store, size = self._store, space.entry_bytes(len(content))
        store.joined()
        if store.stopped:
            return
        try:
            reserved = store.reserve(size, self)
            if reserved is None:
                return
            path, fd = reserved
            try:
                space.write(fd, version, content)
                store.commit(path, self._path(key))
            except BaseException:
                store.give_back(path, size)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            store.stop(error)

    @contextlib.contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """A context in which no other thread or process reads the same content from storage."""
        fd = None
        path = f"{self._store.folder}/{space.BUSY}/{key}"
        if not (self._store.stopped or self._store.full):
            try:
                fd = _sole(path)
            except OSError as error:
                self._store.stop(error)
        try:
            yield
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                os.close(fd)

    @contextlib.contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """A context in which others leave a content to this process. Yields False if another one makes it now.

        Where nothing can be stored, everybody makes it.
        """
        fd, ours, path = None, True, f"{self._store.folder}/{space.BUSY}/{key}"
        if not (self._store.stopped or self._store.full):
            try:
                fd = space.open_lock(path)
                ours = space.locked(fd) and os.fstat(fd).st_nlink > 0
            except OSError as error:
                self._store.stop(error)
        try:
            yield ours
        finally:
            if fd is not None:
                if ours:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                os.close(fd)

    def _path(self, key: str) -> str:
        return f"{self.folder}/{key[:2]}/{key[2:]}"


def _sole(path: str) -> int:
    """The descriptor of a lock file, once nobody else has it. Raises OSError."""
    while True:
        fd = space.open_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner has removed it


_stores: dict[tuple[int, CacheSpec], Store | None] = {}
_opening = threading.Lock()


def opened(spec: CacheSpec) -> Store | None:
    """The store of this process. None if the folder cannot be used, which is reported once."""
    key = os.getpid(), spec  # a fork has locks of its own
    with _opening:
        if key not in _stores:
            try:
                _stores[key] = Store(spec)
            except OSError as error:
                _stores[key] = None
                accounts.tell(f"{spec.path}: {error.strerror or error}")
        return _stores[key]
