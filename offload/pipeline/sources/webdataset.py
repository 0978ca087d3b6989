"""Tar shards, as WebDataset writes them: files that share a name up to its first dot form one sample.

The lister scans the shards once, at the start, for the offsets of their members. After that, any sample is one range read.
"""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import ConfigError
from offload.pipeline.images import EXTENSIONS, DecodeError, decode_image
from offload.pipeline.sources.base import At, Index, Samples, Tell, nowhere, silent
from offload.pipeline.sources.files import Path, list_files, open_filesystem
from offload.pipeline.wire import Column, stack, stack_lists

MOST_SHARDS = 1_000_000
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def list_webdataset(shards: Path | Sequence[Path], *, filesystem: Any = None, tell: Tell = silent) -> Index:
    """The index of shards: a path, a folder of ``*.tar``, a local glob, a pattern with ``{000..019}``, or a list."""
    paths = _expand(shards, filesystem, tell)
    if not paths:
        raise ConfigError(f"no *.tar shards under {shards!r}.")
    fs = open_filesystem(paths[0], filesystem)[0]
    columns: dict[str, list[Any]] = {"shard": [], "key": [], "members": []}
    groups: list[int] = []
    for number, path in enumerate(paths):
        tell(f"{number:,} of {len(paths):,} shards, {len(groups):,} samples")
        inner = open_filesystem(path, filesystem)[1]
        for key, members in _scan(fs, inner):
            columns["shard"].append(inner)
            columns["key"].append(key)
            columns["members"].append(json.dumps(members))
            groups.append(number)
    if not groups:
        raise ConfigError(f"the {len(paths)} shard(s) of {shards!r} hold no samples.")
    name = f"webdataset({paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''})"
    return Index(
        name=name, table=pa.table(columns), reader=WebDatasetReader(fs), groups=np.array(groups, dtype=np.int64)
    )


def _expand(shards: Path | Sequence[Path], filesystem: Any, tell: Tell) -> list[str]:
    if not isinstance(shards, str | os.PathLike):
        return [path for shard in shards for path in _expand(shard, filesystem, tell)]
    text = os.fspath(shards)
    braces = _BRACES.search(text)
    if braces:
        first, last = braces.groups()
        if int(last) - int(first) >= MOST_SHARDS:
            raise ConfigError(f"{text!r} names more than {MOST_SHARDS:,} shards. Correct the range.")
        filled = [
            text[: braces.start()] + str(i).zfill(len(first)) + text[braces.end() :]
            for i in range(int(first), int(last) + 1)
        ]
        return [path for part in filled for path in _expand(part, filesystem, tell)]
    if "://" not in text and any(c in text for c in "*?["):
        return sorted(glob.glob(os.path.expanduser(text)))
    if text.endswith(".tar"):
        return [text]
    scheme = text.split("://", 1)[0] + "://" if "://" in text and filesystem is None else ""
    return [scheme + f for f in list_files(shards, filesystem, tell)[2] if f.endswith(".tar")]


def _scan(fs: Any, path: str) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Each sample's key and, by extension, the place of the member's bytes in the shard: (offset, size)."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with fs.open_input_file(path) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, dot, extension = base.partition(".")
                if member.isfile() and dot and stem:
                    samples.setdefault(f"{folder}/{stem}" if folder else stem, {})[extension.lower()] = (
                        member.offset_data,
                        member.size,
                    )
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(
            f"cannot read {path!r} as a tar shard: {error}. Check the path; compressed shards must be unpacked."
        ) from None
    return list(samples.items())


class WebDatasetReader:
    """A reader of samples. Images become ``image`` (HWC uint8), ``cls`` becomes ``label`` (int64), and other members become columns
    named by their extension: numbers and JSON parsed, text as text, anything else as bytes."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        errors: dict[int, str] = {}
        samples: list[dict[str, Any]] = []
        streams: dict[str, Any] = {}
        try:
            for i, (shard, members) in enumerate(
                zip(rows.column("shard").to_pylist(), rows.column("members").to_pylist(), strict=True)
            ):
                at(i)
                if shard not in streams:
                    streams[shard] = self.fs.open_input_file(shard)
                samples.append(self._sample(streams[shard], json.loads(members), i, errors))
        finally:
            for stream in streams.values():
                stream.close()
        names = dict.fromkeys(name for sample in samples for name in sample)
        columns: dict[str, Column] = {}
        for name in names:
            values = [sample.get(name) for sample in samples]
            if name == "label" and not any(v is None for v in values):
                columns[name] = stack(name, values)
            else:
                columns[name] = values if name == "image" else stack_lists(name, values)
        return Samples(columns, errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        return f"{rows.column('key')[row].as_py()} in {rows.column('shard')[row].as_py()}"

    def _sample(self, stream: Any, members: dict[str, list[int]], row: int, errors: dict[int, str]) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        for extension, (offset, size) in members.items():
            data = bytes(stream.read_at(size, offset))
            value: Any = None
            try:
                if len(data) < size:
                    raise ValueError(f"the shard ends after {len(data)} of its {size} bytes")
                value = _parse(extension, data)
            except (DecodeError, ValueError) as error:
                errors[row] = f"corrupt .{extension}: {error}"
            sample[_column(extension)] = value
        return sample


def _column(extension: str) -> str:
    if f".{extension}" in EXTENSIONS:
        return "image"
    return "label" if extension == "cls" else extension


def _parse(extension: str, data: bytes) -> Any:
    if f".{extension}" in EXTENSIONS:
        return decode_image(data)
    if extension == "cls":
        return np.int64(int(data))
    if extension == "json":
        return json.loads(data)
    if extension in {"txt", "text"}:
        return data.decode()
    return data
