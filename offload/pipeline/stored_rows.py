"""Index rows in files: the names of more samples than memory should hold, as columns that a process maps.

A column of numbers is one file. A column of text or bytes is two: the bounds of its values, and their bytes. Taking rows touches only the
pages of their values. Where it stops: :mod:`offload.pipeline.sources.listing_cache` knows the folders, and keeps the files for later runs.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import ConfigError, RunError
from offload.pipeline.owned_folder import OwnedFolder

IN_MEMORY = 250_000  # samples whose rows stay a table, in some 25 MB
REMEDY = "set XDG_CACHE_HOME to a folder on a disk with room"

_TEXT = {"large_string": pa.large_string(), "large_binary": pa.large_binary()}
_NUMBERS = {"int32": pa.int32(), "int64": pa.int64()}
_AT_ONCE = 1 << 20  # numbers that are changed at once


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredRows:
    """A row for each sample, in the files of a folder. It travels to other processes of this machine as the folder's path.

    Args:
        folder: the folder.
        columns: the type of each column, by name.
        rows: the number of samples.
        sizes: the bytes of each file.
        dictionaries: the values of columns whose files hold only their numbers.
        owned: the folder's owner, where this run alone needs the files.
    """

    folder: Path
    columns: Mapping[str, str]
    rows: int
    sizes: Mapping[str, int]
    dictionaries: Mapping[str, pa.Array] = field(default_factory=dict)
    owned: OwnedFolder | None = None

    def __len__(self) -> int:
        return self.rows

    def __getstate__(self) -> dict[str, Any]:
        # A process that gets a copy reads the files, and leaves them to their owner.
        return {**{name: value for name, value in self.__dict__.items() if name != "_maps"}, "owned": None}

    @property
    def table(self) -> pa.Table:
        """All rows, as a table over the mapped files. Raises RunError if a file is missing or another one."""
        return pa.table({name: self._column(name, kind) for name, kind in self.columns.items()})

    def open(self) -> None:
        """Map the files. Raises RunError if one is missing or another one."""
        _ = self._maps

    def rest(self) -> None:
        """Let the kernel have the memory of the pages that were read."""
        for mapped in self._maps.values():
            if mapped is not None:
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Remove files that no later run needs."""
        if self.owned is not None:
            self.owned.remove()

    @functools.cached_property
    def _maps(self) -> dict[str, mmap.mmap | None]:
        try:
            maps = {name: _mapped(self.folder / name) for name in self.sizes}
        except OSError as error:
            raise RunError(
                f"the index of this run cannot be read on the driver's machine: {self.folder}: {error.strerror or error}. The Ray "
                f"processes of that machine must see the folder, as this user: {REMEDY}."
            ) from None
        for name, mapped in maps.items():
            if (found := 0 if mapped is None else len(mapped)) != self.sizes[name]:
                raise RunError(
                    f"the index of this run has changed: {self.folder / name} holds {found:,} bytes instead of {self.sizes[name]:,}. "
                    "Start the run again."
                )
        return maps

    def _column(self, name: str, kind: str) -> pa.Array:
        values = self._buffer(_values(name))
        if kind in _TEXT:
            return pa.Array.from_buffers(_TEXT[kind], self.rows, [None, self._buffer(_bounds(name)), values], 0)
        numbers = pa.Array.from_buffers(_NUMBERS[kind], self.rows, [None, values], 0)
        if name not in self.dictionaries:
            return numbers
        # A check of the numbers would read them all.
        return pa.DictionaryArray.from_arrays(numbers, self.dictionaries[name], safe=False)

    def _buffer(self, name: str) -> pa.Buffer:
        mapped = self._maps[name]
        return pa.py_buffer(b"" if mapped is None else mapped)


def _mapped(path: Path) -> mmap.mmap | None:
    """The content of a file; None if it is empty. Raises OSError."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else None


def _values(name: str) -> str:
    return f"{name}.values"


def _bounds(name: str) -> str:
    return f"{name}.bounds"


class RowsWriter:
    """Index rows that come batch by batch: a table if they are few, and files if they are more than ``IN_MEMORY``.

    ``make_folder`` makes a folder for the files. The batches have the same columns: text, bytes and numbers, without nulls.
    """

    def __init__(self, make_folder: Callable[[], OwnedFolder]) -> None:
        self._make_folder = make_folder
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._columns: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._folder: OwnedFolder | None = None
        self._files: dict[str, BinaryIO] = {}

    def __len__(self) -> int:
        return self._rows

    def add(self, table: pa.Table) -> None:
        """Add these rows. Raises ConfigError if they cannot be written."""
        self._rows += table.num_rows
        if self._folder is None:
            self._tables.append(table)
            if self._rows <= IN_MEMORY:
                return
        try:
            if self._folder is None:
                self._begin(table.schema)
                for held in self._tables:
                    self._write(held)
                self._tables.clear()
            else:
                self._write(table)
        except OSError as error:
            raise self._unwritable(error) from None

    def finish(
        self,
        *,
        dictionaries: Mapping[str, pa.Array] | None = None,
        numbers: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> pa.Table | StoredRows:
        """The rows. Raises ConfigError if they cannot be written.

        Args:
            dictionaries: the values of columns of which the batches held only the numbers.
            numbers: the new value of each number in these columns of int64.
        """
        dictionaries, numbers = dictionaries or {}, numbers or {}
        if self._folder is None:
            table = pa.concat_tables(self._tables).combine_chunks()
            for name, new in numbers.items():
                changed = pa.array(new[table.column(name).to_numpy()])
                table = table.set_column(table.column_names.index(name), name, changed)
            for name, values in dictionaries.items():
                (indices,) = table.column(name).chunks or [pa.array([], pa.int32())]
                encoded = pa.DictionaryArray.from_arrays(indices, values)
                table = table.set_column(table.column_names.index(name), name, encoded)
            return table
        try:
            for file in self._files.values():
                file.close()
            for name, new in numbers.items():
                self._renumber(self._folder.path / _values(name), new)
        except OSError as error:
            raise self._unwritable(error) from None
        return StoredRows(
            folder=self._folder.path,
            columns=self._columns,
            rows=self._rows,
            sizes=self._sizes,
            dictionaries=dictionaries,
            owned=self._folder,
        )

    def _begin(self, schema: pa.Schema) -> None:
        self._folder = self._make_folder()
        self._columns = {each.name: str(each.type) for each in schema}
        for name, kind in self._columns.items():
            self._open(_values(name))
            if kind in _TEXT:
                self._open(_bounds(name))
                self._append(_bounds(name), np.zeros(1, np.int64))

    def _open(self, name: str) -> None:
        assert self._folder is not None
        self._files[name], self._sizes[name] = (self._folder.path / name).open("wb"), 0

    def _write(self, table: pa.Table) -> None:
        for name, kind in self._columns.items():
            for array in table.column(name).chunks:
                if not len(array):
                    continue
                if kind in _TEXT:
                    _, bounds, values = array.buffers()
                    bounds = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
                    self._append(_bounds(name), bounds[1:] - bounds[0] + self._sizes[_values(name)])
                    self._append(_values(name), np.frombuffer(values, np.uint8)[bounds[0] : bounds[-1]])
                else:
                    self._append(_values(name), array.to_numpy())

    def _append(self, name: str, numbers: NDArray[Any]) -> None:
        self._files[name].write(np.ascontiguousarray(numbers).data)
        self._sizes[name] += numbers.nbytes

    def _renumber(self, path: Path, new: NDArray[np.int64]) -> None:
        if np.array_equal(new, np.arange(len(new))):
            return
        with path.open("r+b") as file:
            for start in range(0, self._rows, _AT_ONCE):
                old = np.fromfile(file, np.int64, min(_AT_ONCE, self._rows - start))
                file.seek(start * old.itemsize)
                file.write(new[old].tobytes())
                file.flush()

    def _unwritable(self, error: OSError) -> ConfigError:
        reason = error.strerror or error
        if self._folder is None:
            return ConfigError(
                f"no folder can be made for the names of more than {IN_MEMORY:,} samples: {reason}. Free space in the user's cache "
                f"folder, or {REMEDY}."
            )
        self._discard()
        return ConfigError(
            f"the names of {self._rows:,} samples cannot be written to {self._folder.path}: {reason}. Free space there, or {REMEDY}."
        )

    def _discard(self) -> None:
        assert self._folder is not None
        self._folder.remove()
        for file in self._files.values():
            try:
                file.close()  # may fail as the write did
            except OSError:
                pass
