"""A folder of images with a sub-folder for each class: ``PATH/<class>/<anything>.jpg``.

A row is the path of an image and the number of its class. Rows come a folder at a time, so that the names of millions of images go to disk
(:mod:`offload.pipeline.index.stored_rows`) as they are listed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.images.decode import EXTENSIONS, DecodeError
from offload.pipeline.images.region_decode import read_image
from offload.pipeline.index.listing_cache import (
    cache,
    cache_rows,
    cached,
    cached_rows,
    facts_of,
    new_folder,
    remove_unused,
)
from offload.pipeline.index.source import At, Index, Reader, Samples, Tell, nowhere, silent
from offload.pipeline.index.stored_rows import RowsWriter, StoredRows
from offload.pipeline.sources.cached_files import FILE, CachedFiles
from offload.pipeline.sources.file_versions import Versions
from offload.pipeline.sources.read_ahead import ReadAhead
from offload.pipeline.sources.storage_paths import (
    WORTH_CACHING,
    PathLike,
    open_folder,
    printable,
    read_file,
    telling_errors,
    unchanged,
    walk_settled,
)
from offload.pipeline.sources.walking import below, walk_remote

_AT_ONCE = 1 << 16  # rows that become a table

Listed = tuple[pa.Table | StoredRows, tuple[str, ...]]
"""(rows, names of the classes)"""


def list_images(
    path: PathLike, filesystem: Any, *, versions: bool, tell: Tell
) -> tuple[pa.Table | StoredRows, tuple[str, ...], pafs.FileSystem, str]:
    """List all images: (rows, names of the classes in sorted order, file system, the folder on it).

    A row has a ``path`` and a ``label``. With ``versions``, rows of remote files also have a ``version``.

    Raises ConfigError if the folder is missing, cannot be read, or holds no images in class folders.
    """
    fs, root = open_folder(path, filesystem)
    if isinstance(fs, pafs.LocalFileSystem):
        return *_local(root, tell), fs, root
    rows = _ImageRows(root, tell, Versions(fs) if versions else None)
    with telling_errors(path):
        walk_remote(fs, root, rows.add)
    return *rows.finish(), fs, root


def _local(root: str, tell: Tell) -> Listed:
    """The images of a local folder, from an earlier listing if no folder has changed since."""
    known = ("images below", root, *EXTENSIONS)
    if (earlier := _earlier(known)) is not None:
        tell(f"{len(earlier[0]):,} images")
        return earlier
    listing = _ImageRows(root, tell, None)
    folders = walk_settled(root, listing.add)
    rows, classes = listing.finish()
    if folders is not None and listing.files >= WORTH_CACHING:
        facts = {"folders": folders, "classes": json.dumps(classes)}
        if isinstance(rows, StoredRows):
            rows = cache_rows(known, rows, facts)
        else:
            cache(known, rows.replace_schema_metadata(facts))
        remove_unused()
    return rows, classes


def _earlier(known: Sequence[str]) -> Listed | None:
    """The rows of an earlier listing, if no folder has changed since then."""
    rows: pa.Table | StoredRows
    if (stored := cached_rows(known, unchanged)) is not None:
        rows, facts = stored
    elif (table := cached(known, unchanged)) is not None:
        facts = facts_of(table)
        rows = table.replace_schema_metadata(None).combine_chunks()
    else:
        return None
    return rows, tuple(json.loads(facts["classes"]))


class _ImageRows:
    """The rows of the images that a walk finds."""

    def __init__(self, root: str, tell: Tell, versions: Versions | None) -> None:
        self.files = 0
        self._root, self._tell, self._versions_of = root, tell, versions
        self._writer = RowsWriter(new_folder)
        self._classes: dict[str, int] = {}  # numbered in the order in which the walk finds them
        self._paths: list[str] = []
        self._labels: list[int] = []
        self._versions: list[int] = []

    def add(self, paths: list[str], infos: Sequence[pafs.FileInfo] | None) -> None:
        """Add the next files. Raises ConfigError for an image outside a class folder."""
        self.files += len(paths)
        for number, path in enumerate(paths):
            if not path.lower().endswith(EXTENSIONS):
                continue
            name, slash, _ = below(self._root, path).partition("/")
            if not slash:
                raise ConfigError(
                    f"'{printable(path)}' is not in a class folder. Expected {_expected(self._root)}: the folder's name is the label."
                )
            self._paths.append(path)
            self._labels.append(self._classes.setdefault(name, len(self._classes)))
            if self._versions_of is not None and infos is not None:
                self._versions.append(self._versions_of.of(infos[number]))
        if len(self._paths) >= _AT_ONCE:
            self._flush()
        self._tell(f"{self.files:,} files")

    def finish(self) -> Listed:
        """The rows, with the classes numbered in sorted order. Raises ConfigError if there are no images."""
        if not self._classes:
            raise ConfigError(
                f"no images under '{printable(self._root)}' ({self.files} other files). Expected {_expected(self._root)} ending in "
                f"{', '.join(EXTENSIONS)}."
            )
        self._flush()
        classes = sorted(self._classes)
        numbers = np.empty(len(classes), dtype=np.int64)
        numbers[[self._classes[name] for name in classes]] = np.arange(len(classes))
        return self._writer.finish(numbers={"label": numbers}), tuple(map(printable, classes))

    def _flush(self) -> None:
        if not self._paths:
            return
        # File names need not be text.
        paths = pa.array(map(os.fsencode, self._paths), pa.large_binary())
        columns = {"path": paths, "label": pa.array(self._labels, pa.int64())}
        if self._versions_of is not None:
            columns["version"] = pa.array(self._versions, pa.int64())
        self._writer.add(pa.table(columns))
        self._paths, self._labels, self._versions = [], [], []


def _expected(root: str) -> str:
    return f"{printable(root.rstrip('/'))}/<class>/<name>"


_BROKEN = "corrupt or truncated image"


def list_image_folder(
    path: PathLike,
    *,
    encoded: bool = False,
    filesystem: Any = None,
    cache: CacheSpec | None = None,
    tell: Tell = silent,
) -> Index:
    """The index of a folder's images: their paths, and the numbers of their classes in sorted order.

    ``encoded``: the transform decodes JPEG files itself. With ``cache``, remote files have a ``version``. Raises ConfigError as
    :func:`list_images` does.
    """
    rows, classes, fs, root = list_images(path, filesystem, versions=cache is not None, tell=tell)
    cached = None if cache is None else CachedFiles(fs, root, cache)
    reader = ImageFolderReader(fs, encoded=encoded, cached=cached)
    return Index(name=f"image_folder({printable(root)})", rows=rows, reader=reader, classes=classes)


_Place = tuple[str, int | None]
"""A file's path, and its version if the listing found one."""


class ImageFolderReader(Reader):
    """A reader that decodes images: ``image``, a list of HWC uint8 arrays, and ``label``, int64. It reads remote and cached files ahead."""

    def __init__(self, fs: Any, *, encoded: bool = False, cached: CachedFiles | None = None) -> None:
        self.fs, self.encoded, self.cached = fs, encoded, cached
        self._ahead: ReadAhead[_Place, bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}

    def begin(self, rows: pa.Table, epoch: int) -> None:
        """Begin a task over these index rows."""
        if self.cached is not None:
            self.cached.begin(epoch)
        elif isinstance(self.fs, pafs.LocalFileSystem):
            return
        if self._ahead is None:
            self._ahead = ReadAhead(self._content)
        self._ahead.begin(_places(rows))

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        errors: dict[int, str] = {}
        images: list[Any] = []
        content_of = self._ahead.get if self._ahead is not None else self._content
        for i, place in enumerate(_places(rows)):
            at(i)
            try:
                images.append(read_image(content_of(place), _BROKEN, encoded=self.encoded))
            except DecodeError as error:
                errors[i] = f"{_BROKEN}: {error}"
                images.append(None)
            except OSError as error:
                errors[i] = f"cannot be read: {error.strerror or error}"
                images.append(None)
        return Samples({"image": images, "label": rows.column("label").to_numpy()}, errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        return printable(os.fsdecode(rows.column("path")[row].as_py()))

    def _content(self, place: _Place) -> bytes:
        path, version = place
        if self.cached is None:
            return read_file(self.fs, path)
        return self.cached.read(path, FILE, version, functools.partial(read_file, self.fs, path))


def _places(rows: pa.Table) -> list[_Place]:
    paths = list(map(os.fsdecode, rows.column("path").to_pylist()))
    versions = rows.column("version").to_pylist() if "version" in rows.column_names else [None] * len(paths)
    return list(zip(paths, versions, strict=True))
