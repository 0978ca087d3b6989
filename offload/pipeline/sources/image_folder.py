"""A folder of images with a sub-folder for each class: ``PATH/<class>/<anything>.jpg``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import ConfigError
from offload.pipeline.images import EXTENSIONS, DecodeError, decode_image
from offload.pipeline.sources.base import At, Index, Samples, Tell, nowhere, silent
from offload.pipeline.sources.files import Path, list_files, read_file


def list_image_folder(path: Path, *, filesystem: Any = None, tell: Tell = silent) -> Index:
    """The index of a folder's images: their paths, and the numbers of their classes in sorted order."""
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
    return Index(name=f"image_folder({root})", table=table, reader=ImageFolderReader(fs), classes=classes)


class ImageFolderReader:
    """A reader that decodes images: ``image``, a list of HWC uint8 arrays, and ``label``, int64."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        errors: dict[int, str] = {}
        images: list[Any] = []
        for i, path in enumerate(rows.column("path").to_pylist()):
            at(i)
            try:
                images.append(decode_image(read_file(self.fs, path)))
            except DecodeError as error:
                errors[i] = f"corrupt or truncated image: {error}"
                images.append(None)
            except OSError as error:
                errors[i] = f"cannot be read: {error.strerror or error}"
                images.append(None)
        return Samples({"image": images, "label": rows.column("label").to_numpy()}, errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        return str(rows.column("path")[row].as_py())
