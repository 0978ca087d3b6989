"""The places of the samples in tar shards: from an index file beside a shard, from an earlier listing, or from the shard's headers.

An index file is what NVIDIA DALI's ``wds2idx`` writes: ``a.idx`` beside ``a.tar``. An earlier listing counts as long as the shard has the
same size and time of modification. Where it stops: :mod:`offload.pipeline.sources.webdataset` reads
the samples.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from offload.errors import ConfigError
from offload.pipeline.aside import each_aside
from offload.pipeline.sources.base import Tell
from offload.pipeline.sources.files import printable, requests_at_once
from offload.pipeline.sources.listing_cache import cache, cached, remove_unused
from offload.pipeline.sources.positioned import Positioned

HEADER = 512  # bytes of a tar header
REQUEST_BYTES = 64 << 10  # at least, where each read is a request

Members = dict[str, tuple[int, int]]
"""The place of each member's bytes in the shard by extension: (offset, size)."""


def list_shards(fs: pafs.FileSystem, paths: Sequence[str], tell: Tell) -> list[pa.Table]:
    """The samples of each shard: their ``key`` and, as JSON, their ``members``. Raises ConfigError for a shard that cannot be read."""
    found: dict[int, pa.Table] = {}
    samples = 0

    def done(shard: tuple[int, pa.Table]) -> None:
        nonlocal samples
        number, found[number] = shard
        samples += found[number].num_rows
        tell(f"{len(found):,} of {len(paths):,} shards, {samples:,} samples")

    def listed(number: int) -> tuple[int, pa.Table]:
        return number, _shard(fs, paths[number])

    each_aside(listed, list(range(len(paths))), threads=requests_at_once(fs), done=done)
    remove_unused()
    return [found[number] for number in range(len(paths))]


def _shard(fs: pafs.FileSystem, path: str) -> pa.Table:
    index_path = f"{path.removesuffix('.tar')}.idx"
    try:
        shard, index = fs.get_file_info([path, index_path])
        # Storage that does not tell when a shard changed gets no cache.
        known = [fs.type_name, shard.path, shard.size, shard.mtime_ns] if shard.size and shard.mtime_ns else None
        table = None if known is None else cached(known)
        if table is None:
            samples = _indexed(fs, shard, index_path) if index.type == pafs.FileType.File else None
            table = _table(_scanned(fs, path) if samples is None else samples)
            if known is not None:
                cache(known, table)
    except (tarfile.TarError, OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"cannot read {path!r} as a tar shard: {error}. Check the path; compressed shards must be unpacked."
        ) from None
    return table


def _table(samples: Mapping[str, Members]) -> pa.Table:
    members = [json.dumps(each) for each in samples.values()]
    return pa.table({"key": pa.array(samples, pa.large_string()), "members": pa.array(members, pa.large_string())})


# --- headers ----------------------------------------------------------------------------------------------------------


def _scanned(fs: pafs.FileSystem, path: str) -> dict[str, Members]:
    samples: dict[str, Members] = {}
    with fs.open_input_file(path) as stream:
        file = stream if isinstance(fs, pafs.LocalFileSystem) else io.BufferedReader(_Requests(stream), REQUEST_BYTES)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                key, extension = _split(printable(member.name))
                if member.isfile() and key:
                    samples.setdefault(key, {})[extension] = (member.offset_data, member.size)
    return samples


def _split(name: str) -> tuple[str, str]:
    """A member's key and extension: ``a/b.seg.png`` has the key ``a/b``. The key is empty for a member of no sample."""
    folder, _, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot:
        return "", ""
    return f"{folder}/{stem}" if folder else stem, extension.lower()


class _Requests(Positioned):
    """A remote file whose reads are requests, each with a time of its own: the headers of small members share one."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream.size())
        self._stream = stream

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read_at(min(len(buffer), max(self._size - self._at, 0)), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# --- index files ------------------------------------------------------------------------------------------------------


def _indexed(fs: pafs.FileSystem, shard: pafs.FileInfo, path: str) -> dict[str, Members] | None:
    """The samples that an index file names; None if it does not fit the shard, or has another format."""
    try:
        with fs.open_input_stream(path) as stream:
            text = bytes(stream.read()).decode(errors="replace")
    except OSError:
        return None
    samples: dict[str, Members] = {}
    names: dict[str, tuple[int, int]] = {}
    version, _, rest = text.partition("\n")
    if version.split()[:1] != ["v1.2"]:
        return None
    for line in rest.splitlines():
        fields = line.split(" ")
        key = _split(fields[3])[0] if len(fields) > 3 else ""
        if len(fields) % 4 or not key or key in samples:
            return None
        members = samples.setdefault(key, {})
        for _, offset, size, name in zip(*(fields[start::4] for start in range(4)), strict=True):
            if _split(name)[0] != key or not (offset.isdecimal() and size.isdecimal()):
                return None
            members[_split(name)[1]] = names[name] = (int(offset), int(size))
    with fs.open_input_file(shard.path) as stream:
        ends = [pick(names, key=lambda name: names[name]) for pick in (min, max) if names]
        fits = all(_is_there(stream, shard.size, name, names[name]) for name in ends)
    return samples if names and fits else None


def _is_there(stream: Any, shard_bytes: int, name: str, place: tuple[int, int]) -> bool:
    """Whether a member lies where an index file says: the shard may have been written anew."""
    offset, size = place
    if offset < HEADER or offset + size > shard_bytes:
        return False
    try:
        header = tarfile.TarInfo.frombuf(bytes(stream.read_at(HEADER, offset - HEADER)), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return header.size == size and (header.name == name or len(name) > 100)  # a longer name has a header of its own
