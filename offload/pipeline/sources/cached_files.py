"""Files that a source reads through its node's cache, if the user asked for one.

A reader says what it reads (a file, or a part of one) and how; this module looks into the cache first. Where it stops:
:mod:`offload.pipeline.cache` keeps the contents, within its bound.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.fs as pafs

from offload.pipeline.cache import accounts
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.cache.store import CachedSource, opened
from offload.pipeline.sources.file_versions import FileState, look_at, storage_name
from offload.pipeline.sources.storage_paths import Positioned

FILE = ""
"""The name of the part that is the whole file."""


class CachedFiles:
    """The files below ``root`` on a file system. It travels to every preprocessing process, and opens the cache there."""

    def __init__(self, fs: pafs.FileSystem, root: str, spec: CacheSpec) -> None:
        self._spec, self._local = spec, isinstance(fs, pafs.LocalFileSystem)
        self._storage = storage_name(fs)
        self._name = _digest(self._storage, root)
        self._opening = threading.Lock()
        self._source: CachedSource | None = None
        self._tried = False

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the cache of its own node.
        return {**self.__dict__, "_opening": None, "_source": None, "_tried": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opening=threading.Lock())

    def begin(self, epoch: int) -> None:
        """Note that a task of this epoch begins."""
        if (source := self._opened()) is not None:
            source.begin(epoch)

    def read(self, path: str, part: str, version: int | None, fetch: Callable[[], bytes]) -> bytes:
        """The content of a part of a file, from the cache or else from ``fetch``, whose errors it raises.

        ``version``: the file's version when it was listed. None for a local file, whose version is looked up now.
        """
        source = self._opened()
        known = version if version is not None else self._now(path)
        if source is None or known is None:
            return _counted(fetch())
        # Without the version: a new version of a file takes the place of the old one.
        key = _digest(self._storage, path, part)
        if (content := source.get(key, known)) is None:
            with source.alone(key):
                if (content := source.get(key, known)) is None:
                    content = _counted(fetch())
                    # A local file that changed during the read may have a mixed content.
                    if version is not None or self._now(path) == known:
                        source.put(key, known, content)
                    return content
        accounts.count(cache_bytes=len(content))
        return content

    def seen(self, path: str, listed: Mapping[str, FileState]) -> FileState | None:
        """A file's size and version: as listed, or now if it is local."""
        return look_at(path) if self._local else listed.get(path)

    def _now(self, path: str) -> int | None:
        """A local file's version at present. None if it is remote, or may change without a trace."""
        state = look_at(path) if self._local else None
        return None if state is None else state.version

    def _opened(self) -> CachedSource | None:
        """The source's contents in this process's cache. None if the cache cannot be used."""
        if not self._tried:
            with self._opening:
                if not self._tried:
                    store = opened(self._spec)
                    try:
                        self._source = None if store is None else store.source(self._name)
                    except OSError as error:
                        assert store is not None
                        store.stop(error)
                    self._tried = True
        return self._source


class CachedFile(Positioned):
    """A file whose reads go through the cache, each as a part of its own. ``open_file`` opens it on storage."""

    def __init__(
        self, files: CachedFiles, path: str, size: int, version: int | None, open_file: Callable[[], Any]
    ) -> None:
        super().__init__(size)
        self._files, self._path, self._version, self._open = files, path, version, open_file
        self._stream: Any = None

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._size - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        start = self._at
        content = self._files.read(self._path, f"{start}+{size}", self._version, lambda: self._fetch(start, size))
        self._at += len(content)
        return content

    def _fetch(self, start: int, size: int) -> bytes:
        if self._stream is None:
            self._stream = self._open()
        return bytes(self._stream.read_at(size, start))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        super().close()


def _counted(content: bytes) -> bytes:
    accounts.count(storage_bytes=len(content))
    return content


def _digest(*parts: str) -> str:
    return hashlib.blake2b(b"\0".join(map(os.fsencode, parts)), digest_size=16).hexdigest()
