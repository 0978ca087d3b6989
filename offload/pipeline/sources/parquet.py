"""Parquet files, with one sample per row. Row groups come in random order, and so do the rows within each.

Folders named ``KEY=VALUE`` stand for columns (Hive partitions), as Spark, pandas and Ray Data write them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from offload.errors import ConfigError
from offload.pipeline.aside import each_aside
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.images.decode import DecodeError
from offload.pipeline.images.region_decode import read_image
from offload.pipeline.index.rows import Runs
from offload.pipeline.index.source import At, Index, Reader, Samples, Tell, nowhere, silent
from offload.pipeline.sources.cached_files import CachedFile, CachedFiles
from offload.pipeline.sources.file_versions import FileState, seen_files
from offload.pipeline.sources.parquet_rows import Stretches, Types, cast, columns_of, common_types, completed, types_of
from offload.pipeline.sources.read_ahead import ReadAhead
from offload.pipeline.sources.storage_paths import (
    PathLike,
    check_text,
    file_name,
    is_file,
    is_folder,
    list_files,
    open_filesystem,
    requests_at_once,
)
from offload.pipeline.sources.walking import below

_NOTHING = "__HIVE_DEFAULT_PARTITION__"  # Hive's name for a missing value
_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """The columns of the folders below ``folder``, and their types: int64 if all values are whole numbers, text otherwise."""

    folder: str = ""
    types: dict[str, pa.DataType] = field(default_factory=dict)

    def only(self, columns: Sequence[str] | None) -> Partitions:
        """The partitions that are among these columns. None: all."""
        types = {name: kind for name, kind in self.types.items() if columns is None or name in columns}
        return dataclasses.replace(self, types=types)

    def add(self, table: pa.Table, file: str) -> pa.Table:
        """The rows of a file, with the columns of its folders after its own. The file's own column wins over a folder's."""
        values = _values(self.folder, file) if self.types else {}
        for name, kind in self.types.items():
            if name not in table.column_names:
                text = values.get(name)
                value = int(text) if text is not None and pa.types.is_integer(kind) else text
                table = table.append_column(name, pa.repeat(pa.scalar(value, kind), table.num_rows))
        return table


def partitions_of(folder: str, files: Sequence[str]) -> Partitions:
    """The columns of the folders between ``folder`` and these files."""
    texts: dict[str, set[str]] = {}
    for file in files:
        for name, text in _values(folder, file).items():
            texts.setdefault(name, set()).update(() if text is None else (text,))
    types = {
        name: pa.int64() if values and all(map(_WHOLE.fullmatch, values)) else pa.string()
        for name, values in texts.items()
    }
    return Partitions(folder=folder, types=types)


def _values(folder: str, file: str) -> dict[str, str | None]:
    parts = (part.partition("=") for part in below(folder, file).split("/")[:-1])
    return {unquote(name): None if text == _NOTHING else unquote(text) for name, sign, text in parts if name and sign}


_BROKEN = "corrupt or truncated image"
_FOOTERS = 16  # kept by a process that reads remote files
_AT_FIRST = 2  # row groups that a task reads at once before it knows their size

_Group = tuple[str, int]
"""A file, and the number of one of its row groups."""


def list_parquet(
    path: PathLike,
    *,
    columns: Sequence[str] | None = None,
    images: Sequence[str] = (),
    encoded: bool = False,
    filesystem: Any = None,
    cache: CacheSpec | None = None,
    tell: Tell = silent,
) -> Index:
    """The index of one file, or of all ``*.parquet`` files below a folder, from the files' footers.

    Folders named ``KEY=VALUE`` are columns. Other folders whose names begin with ``_`` are left out.

    Args:
        columns: the columns to read. None: all.
        images: columns of encoded images to decode.
        encoded: whether the transform decodes JPEGs of the column ``image`` itself.

    Raises:
        ConfigError: if the path is unusable, holds no rows or lacks a column, or if files disagree on a column's type.
    """
    fs, inner = open_filesystem(path, filesystem)
    check_text([inner])
    files = [inner]
    named = file_name(inner).endswith(".parquet")
    # Spark and Ray write folders with names like files, and a file may have any name.
    if is_folder(path, fs, inner) if named else not is_file(path, fs, inner):
        files = [f for f in list_files(path, filesystem, tell)[2] if f.endswith(".parquet") and not _is_aside(inner, f)]
    if not files:
        raise ConfigError(f"no *.parquet files under {inner!r}.")
    check_text(files)
    seen = _seen(fs, files) if cache is not None else {}  # before the footers, which may be newer, never older
    wanted = list(dict.fromkeys([*columns, *images])) if columns is not None else None
    partitions = partitions_of(inner, files)
    sizes, types = _footers(fs, files, images, wanted, partitions, tell)
    counts = np.array([rows for file in files for rows in sizes[file]], dtype=np.int64)
    if counts.sum() == 0:
        raise ConfigError(f"the {len(files)} Parquet file(s) under {inner!r} hold no rows.")
    row_groups = pa.table(
        {
            "file": pa.array([file for file in files for _ in sizes[file]], pa.large_string()),
            "row_group": pa.array([number for file in files for number in range(len(sizes[file]))], pa.int32()),
        }
    )
    rows = Runs(row_groups, counts)
    cached = None if cache is None else CachedFiles(fs, inner, cache)
    reader = ParquetReader(
        fs,
        wanted,
        tuple(images),
        encoded=encoded,
        cached=cached,
        seen=seen,
        types=types,
        partitions=partitions.only(wanted),
    )
    return Index(name=f"parquet({inner})", rows=rows, reader=reader, groups=rows.groups)


def _is_aside(folder: str, file: str) -> bool:
    """Return whether a file lies in a folder without rows of the data set, by Spark's and pandas' rule: ``_delta_log``, ``_temporary``."""
    return any(part.startswith("_") and "=" not in part for part in below(folder, file).split("/")[:-1])


def _seen(fs: Any, files: list[str]) -> dict[str, FileState]:
    try:
        return seen_files(fs, files, requests_at_once(fs))
    except OSError as error:
        raise ConfigError(f"cannot read {files[0]!r} as Parquet: {error}.") from None


def _footers(
    fs: Any,
    files: Sequence[str],
    images: Sequence[str],
    wanted: Sequence[str] | None,
    partitions: Partitions,
    tell: Tell,
) -> tuple[dict[str, list[int]], Types]:
    """Read all footers: the number of rows of each file's row groups, and the common types of ``wanted`` columns (None: of all).

    Raises ConfigError for a file without one of the ``images``, and for a wanted column that no file has.
    """
    sizes: dict[str, list[int]] = {}
    # By schema, the first file that has it: most files share one.
    schemas: dict[tuple[tuple[str, str], ...], tuple[str, Types]] = {}
    names: list[str] = []  # the columns of the first file

    def read(file: str) -> tuple[str, list[str], list[int], Types]:
        try:
            with fs.open_input_file(file) as stream:
                footer = pq.ParquetFile(stream)
                have = [*footer.schema_arrow.names, *partitions.types]
                _check_columns(file, have, images)
                _check_once(file, footer.schema_arrow.names, wanted)
                rows = [footer.metadata.row_group(g).num_rows for g in range(footer.metadata.num_row_groups)]
                own = types_of(footer.schema_arrow, wanted)
                # A column of folders may be a column of some files, too.
                return file, have, rows, {**partitions.only(wanted).types, **own}
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"cannot read {file!r} as Parquet: {error}.") from None

    def done(footer: tuple[str, list[str], list[int], Types]) -> None:
        file, have, sizes[file], types = footer
        if file == files[0]:
            names.extend(have)
        key = tuple(sorted((name, str(kind)) for name, kind in types.items()))
        schemas[key] = min(schemas.get(key, (file, types)), (file, types), key=_file_of)
        tell(f"{len(sizes):,} of {len(files):,} files")

    each_aside(read, list(files), threads=requests_at_once(fs), done=done)
    known = {*partitions.types, *(name for _, types in schemas.values() for name in types)}
    _check_columns(files[0], names, [name for name in wanted or () if name not in known])
    return sizes, common_types(sorted(schemas.values(), key=_file_of))


def _file_of(schema: tuple[str, Types]) -> str:
    return schema[0]


def _check_columns(file: str, have: Sequence[str], asked: Sequence[str]) -> None:
    missing = [c for c in asked if c not in have]
    if missing:
        raise ConfigError(f"{file!r} has no column {missing[0]!r}; its columns are {', '.join(have)}.")


def _check_once(file: str, have: Sequence[str], wanted: Sequence[str] | None) -> None:
    twice = [name for name, count in Counter(have).items() if count > 1 and (wanted is None or name in wanted)]
    if twice:
        raise ConfigError(
            f"{file!r} has several columns {twice[0]!r}. Write it with different names, or name the columns to read without it: "
            "parquet(columns=[...])."
        )


def _runs(rows: pa.Table) -> Iterator[tuple[int, int, _Group]]:
    """(start, stop, row group) of consecutive index rows of one row group."""
    files, groups = rows.column("file"), rows.column("row_group")
    begins = np.full(rows.num_rows, False)
    begins[:1] = True
    for column in (files, groups):
        numbers = _encoded(column).indices.to_numpy()
        begins[1:] |= numbers[1:] != numbers[:-1]
    for start, stop in itertools.pairwise([*np.flatnonzero(begins).tolist(), rows.num_rows]):
        yield start, stop, (files[start].as_py(), groups[start].as_py())


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """The column as a dictionary array, which it usually is already."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array if pa.types.is_dictionary(array.type) else array.dictionary_encode()


class _Footers:
    """The footers of the most recent files, for any thread.

    Reading one takes two requests, so threads that need the same file wait for the first of them.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Future[pq.FileMetaData]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, file: str, read: Callable[[], pq.FileMetaData]) -> pq.FileMetaData:
        """The footer of a file, which ``read`` reads. Raises the errors of ``read``."""
        with self._lock:
            footer, known = self._kept.get(file), file in self._kept
            if footer is None:
                footer = self._kept[file] = Future()
                while len(self._kept) > _FOOTERS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(file)
        if not known:
            try:
                footer.set_result(read())
            except BaseException as error:
                footer.set_exception(error)
                with self._lock:  # the next reader tries again
                    self._kept.pop(file, None)
        return footer.result()


class ParquetReader(Reader):
    """A reader of rows. It keeps the last row group, since a task's rows come from few of them, and reads remote and cached ones ahead.

    Args:
        columns: the columns to read. None: all.
        images: columns of encoded images (bytes, or a struct with ``bytes`` as Hugging Face writes them), which it decodes to HWC uint8.
        encoded: whether JPEGs of the column ``image`` stay encoded.
        cached: the node's cache. None: read from storage.
        seen: the sizes and versions of remote files when they were listed.
        types: the types of columns in which files differ.
        partitions: the columns that folders stand for.
    """

    def __init__(
        self,
        fs: Any,
        columns: list[str] | None,
        images: tuple[str, ...],
        *,
        encoded: bool = False,
        cached: CachedFiles | None = None,
        seen: Mapping[str, FileState] | None = None,
        types: Types | None = None,
        partitions: Partitions | None = None,
    ) -> None:
        self.fs, self.columns, self.images, self.encoded = fs, columns, images, encoded
        self.cached, self.seen, self.types = cached, seen or {}, types or {}
        self.partitions = partitions or Partitions()
        self._held: tuple[_Group, pa.Table] | None = None
        self._ahead: ReadAhead[_Group, pa.Table] | None = None
        self._footers = _Footers()
        self._stretches = Stretches()

    def __getstate__(self) -> dict[str, Any]:
        names = ("fs", "columns", "images", "encoded", "cached", "seen", "types", "partitions")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def begin(self, rows: pa.Table, epoch: int) -> None:
        """Begin a task over these index rows."""
        places, runs = rows.column("row").to_numpy(), list(_runs(rows))
        # Bytes of images are best taken just before they are decoded.
        self._stretches = Stretches() if self.images else Stretches((g, places[start:stop]) for start, stop, g in runs)
        if self.cached is not None:
            self.cached.begin(epoch)
        elif isinstance(self.fs, pafs.LocalFileSystem):
            return
        if self._ahead is None:
            self._ahead = ReadAhead(self._read_group, size=lambda table: int(table.nbytes), at_first=_AT_FIRST)
        groups = [group for _, _, group in runs]
        held = self._held[0] if self._held is not None else None
        self._ahead.begin([group for group, _ in itertools.groupby(groups) if group != held])

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        places = rows.column("row").to_numpy()
        pieces = []
        for start, stop, group in _runs(rows):
            at(start)
            pieces.append(self._stretches.rows(group, places[start:stop], functools.partial(self._row_group, group)))
        columns = columns_of(pieces)
        errors: dict[int, str] = {}
        for name in self.images:
            images = []
            for i, value in enumerate(columns[name]):
                at(i)
                images.append(self._decode(value, i, errors, encoded=self.encoded and name == "image"))
            columns[name] = images
        return Samples(columns, errors)

    def describe(self, rows: pa.Table, row: int) -> str:
        file, group, place = (rows.column(c)[row].as_py() for c in ("file", "row_group", "row"))
        return f"row {place} of row group {group} of {file}"

    def _row_group(self, group: _Group) -> pa.Table:
        if self._held is None or self._held[0] != group:
            table = self._read_group(group) if self._ahead is None else self._ahead.get(group)
            self._held = (group, table)
        return self._held[1]

    def _read_group(self, group: _Group) -> pa.Table:
        file, number = group
        remote = self.cached is not None or not isinstance(self.fs, pafs.LocalFileSystem)
        with self._open(file) as stream:
            # Remote columns come in a few requests at once; local ones are read as they are decoded.
            footer = self._footers.of(file, lambda: pq.ParquetFile(stream).metadata) if remote else None
            opened = pq.ParquetFile(stream, pre_buffer=remote, metadata=footer)
            rows = self.partitions.add(opened.read_row_group(number, columns=self.columns), file)
            return completed(cast(rows, self.types, file), self.types)

    def _open(self, file: str) -> Any:
        if self.cached is not None and (seen := self.cached.seen(file, self.seen)) is not None:
            version = self.seen[file].version if file in self.seen else None
            return CachedFile(self.cached, file, seen.size, version, lambda: self.fs.open_input_file(file))
        return self.fs.open_input_file(file)

    def _decode(self, value: Any, row: int, errors: dict[int, str], *, encoded: bool) -> Any:
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            errors[row] = f"no image: the column holds {'nothing' if data is None else type(data).__name__} here"
            return None
        try:
            return read_image(data, _BROKEN, encoded=encoded)
        except DecodeError as error:
            errors[row] = f"{_BROKEN}: {error}"
            return None
