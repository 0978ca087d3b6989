"""The places of the samples in tar shards: from an index file beside a shard, from an earlier listing, or from the shard's headers.

An index file is what NVIDIA DALI's ``wds2idx`` writes: ``a.idx`` beside ``a.tar``. An earlier listing counts as long as the shard has the
same size and time of modification. Where it stops: :mod:`offload.pipeline.sources.webdataset` reads the samples.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
from numpy.typing import NDArray

from offload.errors import ConfigError
from offload.pipeline.aside import each_in_order
from offload.pipeline.images.decode import EXTENSIONS
from offload.pipeline.index.listing_cache import (
    cache,
    cache_rows,
    cached,
    cached_rows,
    facts_of,
    new_folder,
    remove_unused,
)
from offload.pipeline.index.source import Tell
from offload.pipeline.index.stored_rows import RowsWriter, StoredRows
from offload.pipeline.sources.storage_paths import Positioned, printable, requests_at_once

RULES = 2  # version of the rules by which members form samples; a listing of another version is discarded
HEADER = 512  # bytes of a tar header
REQUEST_BYTES = 64 << 10  # the least to read at once, where each read is a request

# Facts about the shard. webdataset leaves them out, too.
_METADATA = re.compile(r"__[^/]*__(/|$)")

Members = dict[str, tuple[int, int]]
"""The place of each member's bytes in the shard by extension: (offset, size)."""


MOST_COLUMNS = 1000


class ListedShards(NamedTuple):
    """The listing of all shards.

    Args:
        rows: the samples: ``shard``, ``key`` and, as JSON, ``members``.
        counts: the number of samples of each shard.
        columns: all columns that any sample has.
    """

    rows: pa.Table | StoredRows
    counts: NDArray[np.int64]
    columns: tuple[str, ...]


def list_shards(
    fs: pafs.FileSystem, paths: Sequence[str], tell: Tell, patterns: Mapping[str, str] | None = None
) -> ListedShards:
    """The samples of these shards. ``patterns``: by path, for messages, the pattern that names a shard.

    Raises ConfigError for a shard that cannot be read, that holds a file twice, or whose samples' files have more than ``MOST_COLUMNS``
    endings.
    """
    patterns = patterns or {}
    states = _look_up(fs, paths, patterns)
    seen = [[shard.size, shard.mtime_ns] for shard, _ in states]
    # Storage that does not tell when a shard changed gets no cache.
    tells = all(size and changed for size, changed in seen)
    whole = ("shards", RULES, fs.type_name, *paths)
    names = {"shard": pa.array(paths, pa.large_string())}

    def fits(facts: Mapping[str, Any]) -> bool:
        return bool(facts["seen"] == seen) and "columns" in facts

    if tells and (earlier := cached_rows(whole, fits, names)) is not None:
        rows, facts = earlier
        tell(f"{len(paths):,} shards, {len(rows):,} samples")
        return ListedShards(rows, np.array(facts["samples"], dtype=np.int64), tuple(facts["columns"]))
    counts: list[int] = []
    columns: dict[str, None] = {}
    writer = RowsWriter(new_folder)

    def listed(number: int) -> pa.Table:
        return _shard(fs, paths[number], *states[number], patterns)

    def done(table: pa.Table) -> None:
        columns.update(dict.fromkeys(json.loads(facts_of(table)["columns"])))
        _check_columns(paths[len(counts)], columns)
        shard = pa.array(np.full(table.num_rows, len(counts), np.int32))
        writer.add(table.replace_schema_metadata(None).add_column(0, "shard", shard))
        counts.append(table.num_rows)
        tell(f"{len(counts):,} of {len(paths):,} shards, {len(writer):,} samples")

    each_in_order(listed, range(len(paths)), threads=requests_at_once(fs), done=done)
    samples = writer.finish(dictionaries=names)
    if tells and isinstance(samples, StoredRows):
        samples = cache_rows(whole, samples, {"seen": seen, "samples": counts, "columns": list(columns)})
    remove_unused()
    return ListedShards(samples, np.array(counts, dtype=np.int64), tuple(columns))


def columns_of(extensions: Collection[str]) -> dict[str, str]:
    """The column of each member of a sample."""
    # Where an image lies beside its mask (a.jpg, a.png), the choice must not depend on their order in the shard.
    images = [extension for extension in extensions if f".{extension}" in EXTENSIONS]
    names = {"cls": "label"}
    if images:
        names[min(images, key=lambda extension: EXTENSIONS.index(f".{extension}"))] = "image"
    return {extension: names.get(extension, extension) for extension in extensions}


def _check_columns(path: str, columns: dict[str, None]) -> None:
    if len(columns) > MOST_COLUMNS:
        raise ConfigError(
            f"the files of the samples in {printable(path)!r} have more than {MOST_COLUMNS:,} endings, such as "
            f"{next(reversed(columns))!r}. What follows the first dot of a name is its ending: write dots in the names of samples as "
            "another character."
        )


_ShardFacts = tuple[pafs.FileInfo, pafs.FileInfo]
"""The facts that storage has of a shard, and of its index file."""


def _look_up(fs: pafs.FileSystem, paths: Sequence[str], patterns: Mapping[str, str]) -> list[_ShardFacts]:
    facts: list[_ShardFacts] = []

    def look(path: str) -> _ShardFacts:
        try:
            shard, index = fs.get_file_info([path, _index_path(path)])
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error, patterns) from None
        return shard, index

    each_in_order(look, paths, threads=requests_at_once(fs), done=facts.append)
    # Only now: a thread would report whichever missing shard it met first, and the error should name the first in order.
    for path, (shard, _) in zip(paths, facts, strict=True):
        if shard.type == pafs.FileType.NotFound:
            raise _unreadable(path, FileNotFoundError(), patterns)
    return facts


def _shard(
    fs: pafs.FileSystem, path: str, shard: pafs.FileInfo, index: pafs.FileInfo, patterns: Mapping[str, str]
) -> pa.Table:
    known = [RULES, fs.type_name, shard.path, shard.size, shard.mtime_ns] if shard.size and shard.mtime_ns else None
    try:
        table = None if known is None else cached(known, lambda facts: "columns" in facts)
        if table is None:
            samples = _indexed(fs, shard, _index_path(path)) if index.type == pafs.FileType.File else None
            table = _table(path, _scanned(fs, path) if samples is None else samples)
            if known is not None:
                cache(known, table)
    except (tarfile.TarError, OSError, pa.ArrowException) as error:
        raise _unreadable(path, error, patterns) from None
    return table


def _index_path(path: str) -> str:
    return f"{path.removesuffix('.tar')}.idx"


def _unreadable(path: str, error: Exception, patterns: Mapping[str, str]) -> ConfigError:
    why = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
    unreadable = ConfigError(
        f"cannot read {path!r} as a tar shard: {why}. Check the path; compressed shards must be unpacked."
    )
    return named_by(unreadable, patterns[path]) if path in patterns else unreadable


def named_by(error: ConfigError, pattern: str) -> ConfigError:
    """The error about a shard, with the pattern that names it."""
    return ConfigError(f"{error} The pattern {pattern!r} names it.")


def _table(path: str, samples: Mapping[str, Members]) -> pa.Table:
    columns: dict[str, None] = {}
    for extensions in {tuple(members): None for members in samples.values()}:
        columns.update(dict.fromkeys(columns_of(extensions).values()))
        _check_columns(path, columns)
    places = [json.dumps(members) for members in samples.values()]
    table = pa.table({"key": pa.array(samples, pa.large_string()), "members": pa.array(places, pa.large_string())})
    return table.replace_schema_metadata({"columns": json.dumps(list(columns))})


# --- headers ----------------------------------------------------------------------------------------------------------


def _scanned(fs: pafs.FileSystem, path: str) -> dict[str, Members]:
    """The samples of a shard by key, from the headers of its members."""
    samples: dict[str, Members] = {}
    with fs.open_input_file(path) as stream:
        file = stream if isinstance(fs, pafs.LocalFileSystem) else io.BufferedReader(_Requests(stream), REQUEST_BYTES)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                name = printable(member.name)
                key, extension = _split(name)
                if member.isfile() and key:
                    if member.issparse():
                        raise ConfigError(
                            f"the member {name!r} of {path!r} is sparse: its bytes do not lie in one piece. Write the shard without "
                            "tar --sparse."
                        )
                    members = samples.setdefault(key, {})
                    if extension in members:
                        raise ConfigError(
                            f"{path!r} holds the member {name!r} twice (upper and lower case of its ending are the same), and a sample "
                            "has one file of each ending. Write the shard anew: tar --append and --update keep the earlier file, too."
                        )
                    members[extension] = (member.offset_data, member.size)
    return samples


def _split(name: str) -> tuple[str, str]:
    """A member's key and extension: ``a/b.seg.png`` has the key ``a/b``. The key is empty for a member of no sample: metadata, a hidden
    file, and a name without a dot."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or _METADATA.match(name):
        return "", ""
    return f"{folder}{slash}{stem}", extension.lower()


class _Requests(Positioned):
    """A remote file whose reads are requests, each of which takes its time. Behind a buffer, headers of small members share one."""

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
    """The samples that an index file names. None if it does not fit the shard, or has another format."""
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
        # A key that comes again means that a sample's files do not follow one another, which this format cannot say.
        if len(fields) % 4 or not key or key in samples:
            return None
        members = samples.setdefault(key, {})
        for _, offset, size, name in zip(*(fields[start::4] for start in range(4)), strict=True):
            other, extension = _split(name)
            if other != key or extension in members or not (offset.isdecimal() and size.isdecimal()):
                return None
            members[extension] = names[name] = (int(offset), int(size))
    with fs.open_input_file(shard.path) as stream:
        # Two reads are enough: an index of another shard would differ at the first or the last member.
        ends = [pick(names, key=lambda name: names[name]) for pick in (min, max) if names]
        fits = all(_is_there(stream, shard.size, name, names[name]) for name in ends)
    return samples if names and fits else None


def _is_there(stream: Any, shard_bytes: int, name: str, place: tuple[int, int]) -> bool:
    """Return whether a member lies where an index file says. The shard may have been rewritten since."""
    offset, size = place
    if offset < HEADER or offset + size > shard_bytes:
        return False
    try:
        header = tarfile.TarInfo.frombuf(bytes(stream.read_at(HEADER, offset - HEADER)), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return header.size == size and (header.name == name or len(name) > 100)  # a longer name has a header of its own
