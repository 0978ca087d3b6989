"""Tar shards, as WebDataset writes them: files that share a name up to its first dot form one sample.

The lister finds the offsets of the shards' members (:mod:`offload.pipeline.sources.tar_index`). After that, any sample is one range read.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.blocks.wire import Column, stack, stack_lists
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.images.decode import DecodeError
from offload.pipeline.images.region_decode import read_image
from offload.pipeline.index.source import At, Index, Reader, Samples, Tell, nowhere, silent
from offload.pipeline.order.shuffling import Consecutive
from offload.pipeline.sources.cached_files import CachedFiles
from offload.pipeline.sources.file_versions import FileState, seen_files
from offload.pipeline.sources.read_ahead import ReadAhead
from offload.pipeline.sources.shard_names import expanded, joined
from offload.pipeline.sources.storage_paths import (
    PathLike,
    check_text,
    exists,
    file_name,
    is_file,
    list_files,
    open_filesystem,
    printable,
    read_part,
    requests_at_once,
    telling_errors,
)
from offload.pipeline.sources.tar_index import columns_of, list_shards, named_by

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
_INTEGER = re.compile(rb"[+-]?\d+")


def list_webdataset(
    shards: PathLike | Sequence[PathLike],
    *,
    encoded: bool = False,
    filesystem: Any = None,
    cache: CacheSpec | None = None,
    tell: Tell = silent,
) -> Index:
    """The index of shards: a path, a folder of ``*.tar``, a glob, a pattern with braces such as ``{000..019}``, several of these joined by
    ``::``, or a list.

    ``encoded``: the transform decodes JPEG members itself. Raises ConfigError if there are no shards or samples, or if a shard cannot be
    read.
    """
    listed = _shards(shards, filesystem, tell)
    if not listed:
        raise ConfigError(f"no *.tar shards under {shards!r}.")
    fs, paths, inner = listed[0].fs, [shard.path for shard in listed], [shard.inner for shard in listed]
    if (other := next((shard.path for shard in listed if shard.fs.type_name != fs.type_name), None)) is not None:
        raise ConfigError(
            f"{paths[0]!r} and {other!r} lie on different storage. Name the shards of each in a webdataset of its own, and join them: "
            "offload.mix({'a': ..., 'b': ...})."
        )
    check_text(inner)
    seen = _seen(fs, inner) if cache is not None else {}  # before the members, which may be newer, never older
    patterns = {shard.inner: shard.pattern for shard in listed if shard.pattern}
    rows, counts, columns = list_shards(fs, inner, tell, patterns)
    if not counts.any():
        raise ConfigError(f"the {len(paths)} shard(s) of {shards!r} hold no samples.")
    name = f"webdataset({paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''})"
    cached = None if cache is None else CachedFiles(fs, os.path.dirname(inner[0]), cache)
    reader = WebDatasetReader(fs, columns, encoded=encoded, cached=cached, seen=seen)
    return Index(name=name, rows=rows, reader=reader, groups=Consecutive(counts))


def _seen(fs: pafs.FileSystem, paths: list[str]) -> dict[str, FileState]:
    try:
        return seen_files(fs, paths, requests_at_once(fs))
    except OSError as error:
        raise ConfigError(f"cannot read the shards of {os.path.dirname(paths[0])!r}: {error}.") from None


class _Shard(NamedTuple):
    """A shard.

    Args:
        path: the user's path, for messages.
        fs, inner: the file system, and the path on it.
        pattern: the pattern with braces or ``::`` that names it, if one does.
    """

    path: str
    fs: pafs.FileSystem
    inner: str
    pattern: str = ""


def _shards(shards: PathLike | Sequence[PathLike], filesystem: Any, tell: Tell) -> list[_Shard]:
    """The shards in their order. Raises ConfigError for a name without shards."""
    if not isinstance(shards, str | os.PathLike):
        return [shard for path in shards for shard in _shards(path, filesystem, tell)]
    pattern = os.fspath(shards)
    names = _names(pattern, filesystem)
    listed: list[_Shard] = []
    for name in names:
        try:
            by_name = _named(name, filesystem, tell)
            if not by_name:
                raise ConfigError(f"no *.tar shards under {name!r}.")
        except ConfigError as error:
            raise error if name == pattern else named_by(error, pattern) from None
        listed += by_name if name == pattern else [shard._replace(pattern=pattern) for shard in by_name]
    return listed


def _names(pattern: str, filesystem: Any) -> list[str]:
    """The paths, folders and globs that a pattern with braces and ``::`` stands for. What exists is no pattern."""
    local = filesystem is None and "://" not in pattern
    if local and os.path.exists(os.path.expanduser(pattern)):
        return [pattern]
    if filesystem is None and pattern.startswith("pipe:"):
        raise ConfigError(
            f"{pattern!r} is a command, whose output can only be read from its beginning to its end, and offload reads samples in any "
            "order. Name the shards instead, such as 's3://bucket/{000..019}.tar'; copy them first if no file system opens them."
        )
    if not local and ("{" in pattern or "::" in pattern) and _exists_elsewhere(pattern, filesystem):
        return [pattern]
    if local and pattern.startswith("file:"):
        return _names(pattern.removeprefix("file:"), filesystem)
    folder = _present_folder(pattern) if local else ""
    first, *rest = joined(pattern[len(folder) :])
    if rest:
        return [name for part in (folder + first, *rest) for name in _names(part, filesystem)]
    return [folder + name for name in expanded(first)] if "{" in first else [pattern]


def _exists_elsewhere(path: str, filesystem: Any) -> bool:
    try:
        fs, inner = open_filesystem(path, filesystem)
    except ConfigError:
        return False  # such as s3://bucket-{a,b}/0.tar
    return exists(path, fs, inner)


def _present_folder(path: str) -> str:
    """The part of a path that is a folder of this machine, and may have braces in its own name."""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(os.path.expanduser(folder)):
        folder = os.path.dirname(folder)
    return folder


def _named(name: str, filesystem: Any, tell: Tell) -> list[_Shard]:
    """The shards of a path, a folder or a glob."""
    local = filesystem is None and "://" not in name
    if _is_glob(name) and not (local and os.path.exists(os.path.expanduser(name))):
        if local:
            return [shard for path in _matching(name) for shard in _matched(path, filesystem, tell)]
        if (matching := _matching_elsewhere(name, filesystem, tell)) is not None:
            return matching
    return _at_path(name, filesystem, tell)


def _at_path(path: str, filesystem: Any, tell: Tell) -> list[_Shard]:
    """The shards of a path that is no pattern."""
    local = filesystem is None and "://" not in path
    if not (local and os.path.isdir(os.path.expanduser(path))):
        fs, inner = open_filesystem(path, filesystem)
        name = file_name(inner)
        if name.endswith(_COMPRESSED):
            raise _compressed(path)
        if name.endswith(".tar") or is_file(path, fs, inner):
            return [_Shard(path, fs, inner)]
    return _in_folder(path, filesystem, tell, _scheme(path, filesystem))


def _in_folder(folder: PathLike, filesystem: Any, tell: Tell, scheme: str) -> list[_Shard]:
    fs, _, files = list_files(folder, filesystem, tell)
    shards = [_Shard(scheme + f, fs, f) for f in files if f.endswith(".tar")]
    packed = next((f for f in files if f.endswith(_COMPRESSED)), None)
    if packed is not None and not shards:
        raise _compressed(scheme + packed)
    return shards


def _scheme(text: str, filesystem: Any) -> str:
    """The scheme and ``://`` of a URI, to put before paths on its file system. Empty for other texts."""
    return text.split("://", 1)[0] + "://" if "://" in text and filesystem is None else ""


def _is_glob(text: str) -> bool:
    return any(c in text for c in "*?[")


def _matching(text: str) -> list[str]:
    folder, name = os.path.split(os.path.expanduser(text))
    return sorted(glob.glob(os.path.join(glob.escape(folder) if os.path.isdir(folder) else folder, name)))


def _matched(path: str, filesystem: Any, tell: Tell) -> list[_Shard]:
    """The shards of a path that matched a pattern. A file then counts as a shard whatever its name."""
    if os.path.isdir(path) or path.endswith(_COMPRESSED):
        return _at_path(path, filesystem, tell)
    return [_Shard(path, *open_filesystem(path, filesystem))]


def _matching_elsewhere(text: str, filesystem: Any, tell: Tell) -> list[_Shard] | None:
    """The shards of a pattern on remote storage, in the order of local ones. None if it is the path of something that exists."""
    fs, pattern = open_filesystem(text, filesystem)
    scheme = _scheme(text, filesystem)
    with telling_errors(text):
        # A URI's options (?region=...) are not part of the path.
        if not _is_glob(pattern) or fs.get_file_info(pattern).type != pafs.FileType.NotFound:
            return None
        matching = _glob(fs, pattern)
    shards: list[_Shard] = []
    for info in matching:
        if info.type == pafs.FileType.Directory:
            shards += _in_folder(info.path, fs, tell, scheme)
        elif info.path.endswith(_COMPRESSED):
            raise _compressed(scheme + info.path)
        else:
            shards.append(_Shard(scheme + info.path, fs, info.path))
    return shards


def _glob(fs: pafs.FileSystem, pattern: str) -> list[pafs.FileInfo]:
    """The files and folders that match a pattern with ``*``, ``?`` and ``[]``, sorted by path. Hidden ones need a dot in the pattern."""
    folder, name = os.path.split(pattern)
    folders = [folder]
    if _is_glob(folder) and fs.get_file_info(folder).type == pafs.FileType.NotFound:
        folders = [info.path for info in _glob(fs, folder) if info.type == pafs.FileType.Directory]
    entries = [info for path in folders for info in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))]
    hidden = name.startswith(".")
    matching = [f for f in entries if fnmatch.fnmatchcase(f.base_name, name) and f.base_name.startswith(".") <= hidden]
    return sorted(matching, key=lambda info: info.path)


def _compressed(path: str) -> ConfigError:
    return ConfigError(
        f"{printable(path)!r} is a compressed shard, from which single samples cannot be read. Decompress it to a .tar file, for "
        "example with gunzip."
    )


class WebDatasetReader(Reader):
    """A reader of samples.

    The image becomes ``image`` (HWC uint8), ``cls`` becomes ``label`` (int64), and other members become columns named by their extension:
    JSON parsed, text as text, anything else as bytes, further images too. A sample has None in each of ``columns`` for which it has no
    member, whatever the other samples of the call have.
    """

    members_vary = True

    def __init__(
        self,
        fs: Any,
        columns: Sequence[str],
        *,
        encoded: bool = False,
        cached: CachedFiles | None = None,
        seen: Mapping[str, FileState] | None = None,
    ) -> None:
        self.fs, self.columns, self.encoded, self.cached, self.seen = fs, columns, encoded, cached, seen or {}
        self._shards = _OpenShards(fs)
        self._ahead: ReadAhead[_Place, bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("fs", "columns", "encoded", "cached", "seen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

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
        samples: list[dict[str, Any]] = []
        content_of = self._ahead.get if self._ahead is not None else self._content
        for i, place in enumerate(_places(rows)):
            at(i)
            samples.append(_sample(place, content_of(place), i, errors, encoded=self.encoded))
        columns: dict[str, Column] = {}
        for name in self.columns:
            values = [sample.get(name) for sample in samples]
            if name == "label" and not any(v is None for v in values):
                columns[name] = stack(name, values)
            else:
                columns[name] = values if name == "image" else stack_lists(name, values)
        return Samples(columns, errors)

    def _content(self, place: _Place) -> bytes:
        if self.cached is None:
            return self._shards.read(place)
        shard, members = place
        version = self.seen[shard].version if shard in self.seen else None
        return self.cached.read(shard, members, version, functools.partial(self._shards.read, place))

    def describe(self, rows: pa.Table, row: int) -> str:
        return f"{rows.column('key')[row].as_py()} in {rows.column('shard')[row].as_py()}"


_Place = tuple[str, str]
"""A sample's shard, and its members as JSON: {extension: (offset, size)}."""

_OPEN_SHARDS = 16


class _OpenShards:
    """The open shards, for any thread. Opening one on remote storage takes a request, so the most recent stay open."""

    def __init__(self, fs: Any) -> None:
        # A stream of fsspec reads one part at a time, and costs another request, so none stays open.
        self._fs, self._keeps = fs, not isinstance(fs, pafs.PyFileSystem)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, place: _Place) -> bytes:
        """The contents of a sample's members, one after the other. Raises OSError."""
        shard, members = place
        wanted = list(json.loads(members).values())
        if self._keeps:
            stream = self._kept_open(shard)
            return _contents(lambda offset, size: bytes(stream.read_at(size, offset)), wanted)
        return _contents(functools.partial(read_part, self._fs, shard), wanted)

    def _kept_open(self, shard: str) -> Any:
        with self._lock:
            if shard not in self._kept:
                self._kept[shard] = self._fs.open_input_file(shard)
                while len(self._kept) > _OPEN_SHARDS:
                    self._kept.popitem(last=False)  # closed once no thread reads from it
            self._kept.move_to_end(shard)
            return self._kept[shard]


def _contents(read: Callable[[int, int], bytes], members: Sequence[tuple[int, int]]) -> bytes:
    """The bytes of these members, read at once if they lie close together. ``read`` takes an offset and a size."""
    first, stop = min(offset for offset, _ in members), max(offset + size for offset, size in members)
    wanted = sum(size for _, size in members)
    # One request for all, unless more than half of its bytes would be of no use.
    if stop - first > 2 * wanted + _NEAR_BYTES:
        return b"".join(read(offset, size) for offset, size in members)
    data = read(first, stop - first)
    return b"".join(data[offset - first : offset - first + size] for offset, size in members)


_NEAR_BYTES = 64 << 10


def _places(rows: pa.Table) -> list[_Place]:
    return list(zip(rows.column("shard").to_pylist(), rows.column("members").to_pylist(), strict=True))


def _sample(place: _Place, content: bytes, row: int, errors: dict[int, str], *, encoded: bool) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    start = 0
    members = json.loads(place[1])
    columns = columns_of(members)
    for extension, (_, size) in members.items():
        data = content[start : start + size]
        start += size
        value: Any = None
        try:
            if len(data) < size:
                raise ValueError(f"the shard ends after {len(data)} of its {size} bytes")
            if columns[extension] == "image" != extension:
                value = read_image(data, f"corrupt .{extension}", encoded=encoded)
            else:
                value = _parse(extension, data)
        except (DecodeError, ValueError) as error:
            errors[row] = f"corrupt .{extension}: {error}"
        sample[columns[extension]] = value
    return sample


def _parse(extension: str, data: bytes) -> Any:
    if extension == "cls":
        if not _INTEGER.fullmatch(data.strip()):
            raise ValueError(
                f"it holds no whole number, but {printable(data[:40].decode(errors='replace'))!r}. Text belongs into .txt"
            )
        return np.int64(int(data))
    if extension == "json":
        return json.loads(data)
    if extension in {"txt", "text"}:
        return data.decode()
    return data
