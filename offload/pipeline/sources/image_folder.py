"""A folder of images with a sub-folder for each class: ``PATH/<class>/<anything>.jpg``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.images import EXTENSIONS, DecodeError
from offload.pipeline.region_decode import read_image
from offload.pipeline.sources.base import At, Index, Samples, Tell, nowhere, silent
from offload.pipeline.sources.files import Path, list_files, read_file
from offload.pipeline.sources.read_ahead import ReadAhead

_BROKEN = "corrupt or truncated image"


def list_image_folder(path: Path, *, encoded: bool = False, filesystem: Any = None, tell: Tell = silent) -> Index:
    """The index of a folder's images: their paths, and the numbers of their classes in sorted order. ``encoded``: the transform decodes
    JPEG files itself."""
    fs, root, files = list_files(path, filesystem, tell)
    images = [f for f in files if f.lower().endswith(EXTENSIONS)]
    if not images:
        raise ConfigError(
            f"no images under {root!r} ({len(files)} other files). Expected {root}/<class>/<name> ending in "
            f"{', '.join(EXTENSIONS)}."
        )
    relative = [f[len(root) + 1 :].split("/") for f in images]
    loose = next((f for f, parts in zip(images, relative, strict=True) if len(parts) < 2), None)
    if loose is not None:
        raise ConfigError(
            f"{loose!r} is not in a class folder. Expected {root}/<class>/<name>: the folder's name is the label."
        )
    classes = tuple(sorted({parts[0] for parts in relative}))
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[parts[0]] for parts in relative], dtype=np.int64)
    table = pa.table({"path": pa.array(images), "label": labels})
    return Index(
        name=f"image_folder({root})", table=table, reader=ImageFolderReader(fs, encoded=encoded), classes=classes
    )


class ImageFolderReader:
    """A reader that decodes images: ``image``, a list of HWC uint8 arrays, and ``label``, int64. It reads remote files ahead."""

    def __init__(self, fs: Any, *, encoded: bool = False) -> None:
        self.fs, self.encoded = fs, encoded
        self._ahead: ReadAhead[str, bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}

    def begin(self, rows: pa.Table) -> None:
        """Begin a task over these index rows."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            return
        if self._ahead is None:
            self._ahead = ReadAhead(functools.partial(read_file, self.fs))
        self._ahead.begin(rows.column("path").to_pylist())

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        errors: dict[int, str] = {}
        images: list[Any] = []
        content_of = self._ahead.get if self._ahead is not None else functools.partial(read_file, self.fs)
        for i, path in enumerate(rows.column("path").to_pylist()):
            at(i)
            try:
                images.append(read_image(content_of(path), _BROKEN, encoded=self.encoded))
            except DecodeError as error:
                errors[i] = f"{_BROKEN}: {error}"
                images.append(None)
            except OSError as error:
                errors[i] = f"cannot be read: {error.strerror or error}"
                images.append(None)
        return Samples({"image": images, "label": rows.column("label").to_numpy()}, errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        return str(rows.column("path")[row].as_py())
