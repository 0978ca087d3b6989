"""A folder of images with a sub-folder for each class: ``PATH/<class>/<anything>.jpg``."""

from __future__ import annotations

import functools
import os
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.images import DecodeError
from offload.pipeline.region_decode import read_image
from offload.pipeline.sources.base import At, Index, Samples, Tell, nowhere, silent
from offload.pipeline.sources.cached_files import FILE, CachedFiles
from offload.pipeline.sources.files import Path, printable, read_file
from offload.pipeline.sources.image_rows import list_images
from offload.pipeline.sources.read_ahead import ReadAhead

_BROKEN = "corrupt or truncated image"


def list_image_folder(
    path: Path, *, encoded: bool = False, filesystem: Any = None, cache: CacheSpec | None = None, tell: Tell = silent
) -> Index:
    """The index of a folder's images: their paths, and the numbers of their classes in sorted order. ``encoded``: the transform decodes
    JPEG files itself. With ``cache``, remote files have a ``version``."""
    rows, classes, fs, root = list_images(path, filesystem, versions=cache is not None, tell=tell)
    cached = None if cache is None else CachedFiles(fs, root, cache)
    reader = ImageFolderReader(fs, encoded=encoded, cached=cached)
    return Index(name=f"image_folder({printable(root)})", rows=rows, reader=reader, classes=classes)


_Place = tuple[str, int | None]
"""A file's path, and its version if the listing found one."""


class ImageFolderReader:
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
