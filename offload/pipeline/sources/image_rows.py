"""The rows of an image folder: the path of each image, and the number of its class. They come a folder at a time, so that the names of
millions of images go to disk (:mod:`offload.pipeline.stored_rows`) as they are found.

Where it stops: :mod:`offload.pipeline.sources.image_folder` reads the images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.images import EXTENSIONS
from offload.pipeline.sources.base import Tell
from offload.pipeline.sources.files import (
    WORTH_CACHING,
    Path,
    open_folder,
    printable,
    telling_errors,
    unchanged,
    walk_settled,
)
from offload.pipeline.sources.listing_cache import (
    cache,
    cache_rows,
    cached,
    cached_rows,
    facts_of,
    new_folder,
    remove_unused,
)
from offload.pipeline.sources.versions import Versions
from offload.pipeline.sources.walking import below, walk_remote
from offload.pipeline.stored_rows import RowsWriter, StoredRows

_AT_ONCE = 1 << 16  # rows that become a table

Listed = tuple[pa.Table | StoredRows, tuple[str, ...]]
"""The rows, and the names of the classes."""


def list_images(
    path: Path, filesystem: Any, *, versions: bool, tell: Tell
) -> tuple[pa.Table | StoredRows, tuple[str, ...], pafs.FileSystem, str]:
    """The rows of all images (``path``, ``label`` and, of remote files with ``versions``, ``version``), the names of the classes in sorted
    order, the file system, and the folder on it.

    Raises ConfigError if the folder is missing, cannot be read, or holds no images in class folders.
    """
    fs, root = open_folder(path, filesystem)
    if isinstance(fs, pafs.LocalFileSystem):
        return *_local(root, tell), fs, root
    rows = _Rows(root, tell, Versions(fs) if versions else None)
    with telling_errors(path):
        walk_remote(fs, root, rows.add)
    return *rows.finish(), fs, root


def _local(root: str, tell: Tell) -> Listed:
    known = ("images below", root, *EXTENSIONS)
    if (earlier := _earlier(known)) is not None:
        tell(f"{len(earlier[0]):,} images")
        return earlier
    listing = _Rows(root, tell, None)
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


class _Rows:
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
        """Take the next files. Raises ConfigError for an image outside a class folder."""
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
        # Names of files need not be text.
        paths = pa.array(map(os.fsencode, self._paths), pa.large_binary())
        columns = {"path": paths, "label": pa.array(self._labels, pa.int64())}
        if self._versions_of is not None:
            columns["version"] = pa.array(self._versions, pa.int64())
        self._writer.add(pa.table(columns))
        self._paths, self._labels, self._versions = [], [], []


def _expected(root: str) -> str:
    return f"{printable(root.rstrip('/'))}/<class>/<name>"
