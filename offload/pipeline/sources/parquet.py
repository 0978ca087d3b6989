"""Parquet files, with one sample per row. Row groups come in random order, and so do the rows within each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from offload.errors import ConfigError
from offload.pipeline.images import DecodeError
from offload.pipeline.region_decode import read_image
from offload.pipeline.sources.base import At, Index, Samples, Tell, nowhere, silent
from offload.pipeline.sources.files import Path, list_files, open_filesystem
from offload.pipeline.wire import Column, decode, stack_lists

_BROKEN = "corrupt or truncated image"


def list_parquet(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    images: Sequence[str] = (),
    encoded: bool = False,
    filesystem: Any = None,
    tell: Tell = silent,
) -> Index:
    """The index of one file, or of all ``*.parquet`` files below a folder, from the files' footers. ``encoded``: the transform decodes
    JPEGs of the column ``image`` itself."""
    fs, inner = open_filesystem(path, filesystem)
    files = [inner]
    # Spark and Ray write folders with names like files.
    if not inner.endswith(".parquet") or fs.get_file_info(inner).type == pafs.FileType.Directory:
        files = [f for f in list_files(path, filesystem, tell)[2] if f.endswith(".parquet")]
    if not files:
        raise ConfigError(f"no *.parquet files under {inner!r}.")
    parts: list[dict[str, Any]] = []
    group = 0
    for done, file in enumerate(files):
        tell(f"{done:,} of {len(files):,} files")
        try:
            with fs.open_input_file(file) as stream:
                footer = pq.ParquetFile(stream)
                _check_columns(file, footer.schema_arrow.names, [*(columns or ()), *images])
                sizes = [footer.metadata.row_group(g).num_rows for g in range(footer.metadata.num_row_groups)]
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"cannot read {file!r} as Parquet: {error}.") from None
        for number, rows in enumerate(sizes):
            parts.append({"file": file, "row_group": number, "rows": rows, "group": group})
            group += 1
    counts = np.array([p["rows"] for p in parts], dtype=np.int64)
    if counts.sum() == 0:
        raise ConfigError(f"the {len(files)} Parquet file(s) under {inner!r} hold no rows.")
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    table = pa.table(
        {
            "file": pa.DictionaryArray.from_arrays(
                np.repeat(np.arange(len(parts), dtype=np.int32), counts), [p["file"] for p in parts]
            ),
            # Parquet counts the rows of a group in 64 bits, but groups of more than 2³¹ rows would not fit into memory.
            "row_group": np.repeat(np.array([p["row_group"] for p in parts], np.int32), counts),
            "row": (np.arange(counts.sum()) - starts).astype(np.int32),
        }
    )
    groups = np.repeat([p["group"] for p in parts], counts).astype(np.int64)
    wanted = list(dict.fromkeys([*columns, *images])) if columns is not None else None
    reader = ParquetReader(fs, wanted, tuple(images), encoded=encoded)
    return Index(name=f"parquet({inner})", table=table, reader=reader, groups=groups)


def _check_columns(file: str, have: Sequence[str], asked: Sequence[str]) -> None:
    missing = [c for c in asked if c not in have]
    if missing:
        raise ConfigError(f"{file!r} has no column {missing[0]!r}; its columns are {', '.join(have)}.")


class ParquetReader:
    """A reader of rows. It keeps the last row group, since a task's rows come from few of them. ``images`` are columns of encoded
    images (bytes, or a struct with ``bytes`` as Hugging Face writes them), which it decodes to HWC uint8."""

    def __init__(self, fs: Any, columns: list[str] | None, images: tuple[str, ...], *, encoded: bool = False) -> None:
        self.fs, self.columns, self.images, self.encoded = fs, columns, images, encoded
        self._held: tuple[tuple[str, int], pa.Table] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        groups, places = rows.column("row_group").to_numpy(), rows.column("row").to_numpy()
        files = rows.column("file").combine_chunks()
        cuts = (np.flatnonzero((np.diff(groups) != 0) | (np.diff(files.indices.to_numpy()) != 0)) + 1).tolist()
        pieces = []
        for start, stop in itertools.pairwise([0, *cuts, len(places)]):
            at(start)
            pieces.append(self._row_group(files[start].as_py(), int(groups[start])).take(pa.array(places[start:stop])))
        # Files may hold their columns in different orders.
        table = pa.concat_tables(pieces, promote_options="default").combine_chunks()
        columns: dict[str, Column] = {}
        for name, column in decode(table, foreign=True).items():
            columns[name] = stack_lists(name, column) if isinstance(column, list) else column
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

    def _row_group(self, file: str, group: int) -> pa.Table:
        if self._held is None or self._held[0] != (file, group):
            with self.fs.open_input_file(file) as stream:
                # Remote columns come in a few requests at once; local ones are read as they are decoded.
                remote = not isinstance(self.fs, pafs.LocalFileSystem)
                table = pq.ParquetFile(stream, pre_buffer=remote).read_row_group(group, columns=self.columns)
            self._held = ((file, group), table)
        return self._held[1]

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
