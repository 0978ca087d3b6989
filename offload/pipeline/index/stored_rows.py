"""Index rows in files: the names of more samples than memory should hold, as columns of which a process reads what it needs.

A column of numbers is one file. A column of text or bytes is two: the bounds of its values, and their bytes. Taking rows reads these rows
and those between neighbours.

The files lie in a folder of one process, which removes it. A killed process leaves its folder behind with a free lock, and the next process
of this host removes that one. Other hosts may share the disk, and not every shared disk knows their locks, so they leave it alone.

Where it stops: :mod:`offload.pipeline.index.listing_cache` knows the folders, and keeps the files for later runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import ConfigError, RunError
from offload.process import forks

_PREFIX = f"offload-index-{socket.gethostname()}-"
_LOCK = "lock"


class OwnedFolder:
    """A folder that this process owns. ``path``: where it is."""

    def __init__(self, parent: Path) -> None:
        """Make a folder in ``parent``. Raises OSError."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = forks.locked_file(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # held for as long as the owner lives
            except OSError:  # the disk knows no locks
                self._lock.close()
                shutil.rmtree(self.path, ignore_errors=True)
                raise
            if os.fstat(self._lock.fileno()).st_nlink:
                break
            self._lock.close()  # another process took the folder for one that was left behind
        self._end = weakref.finalize(self, _end, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder, if it is still there."""
        self._end()

    def give(self, path: Path) -> None:
        """Rename the folder, which nobody owns any more. Raises OSError."""
        os.rename(self.path, path)
        # From here on, the end of this process must not remove the folder.
        self._end.detach()
        self._lock.close()
        (path / _LOCK).unlink()


def _end(path: Path, lock: IO[bytes], pid: int) -> None:
    if os.getpid() != pid:  # a fork, whose parent still needs the folder
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def remove_left(parent: Path) -> None:
    """Remove the folders of owners that were killed."""
    left: list[Path] = []
    with contextlib.suppress(OSError):
        left = list(parent.glob(f"{_PREFIX}*"))
    for path in left:
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                # Fails while the owner lives: the kernel frees its lock only when it ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


IN_MEMORY = 250_000  # samples whose rows stay a table, in some 25 MB
REMEDY = "set XDG_CACHE_HOME to a folder on a disk with room"

_TEXT = {"large_string": pa.large_string(), "large_binary": pa.large_binary()}
_NUMBERS = {"int32": pa.int32(), "int64": pa.int64()}
_AT_ONCE = 1 << 20  # numbers that are changed at once
_NEAR = 32  # rows this close together are one read: it takes as long as the shortest


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
        return {**{name: value for name, value in self.__dict__.items() if name != "_files"}, "owned": None}

    @property
    def table(self) -> pa.Table:
        """All rows, as a table over the mapped files. Raises RunError if a file is missing or another one."""

        def buffer(name: str) -> pa.Buffer:
            with self._readable():
                return pa.py_buffer(self._files.mapped(name) if self.sizes[name] else b"")

        return pa.table({name: self._column(name, kind, buffer) for name, kind in self.columns.items()})

    def rows_at(self, ids: NDArray[np.integer[Any]]) -> pa.Table:
        """These rows, in this order. Raises RunError if a file is missing or another one.

        Mapped pages would take longer: the kernel maps sixteen around each value, and unmaps them again.
        """
        asked, again = np.unique(ids, return_inverse=True)
        asked = asked.astype(np.int64)
        # The first row of each read. Rows between near neighbours are read with them, and left out afterwards.
        begins = np.flatnonzero(np.diff(asked, prepend=-_NEAR - 1) > _NEAR)
        lengths = np.diff(begins, append=len(asked))
        first, counts = asked[begins], asked[begins + lengths - 1] + 1 - asked[begins]
        # The place of each row in what all reads together return.
        inside = asked - np.repeat(first - np.cumsum(counts) + counts, lengths)
        with self._readable():
            near = {name: self._near(name, kind, first, counts) for name, kind in self.columns.items()}
        places = pa.array(inside[again])
        wanted = {name: column.take(places) for name, column in near.items()}
        return pa.table({name: self._decoded(name, column) for name, column in wanted.items()})

    def open(self) -> None:
        """Open the files. Raises RunError if one is missing or another one."""
        _ = self._files

    def close(self) -> None:
        """Remove files that no later run needs."""
        if self.owned is not None:
            self.owned.remove()

    @functools.cached_property
    def _files(self) -> _Files:
        with self._readable():
            files = _Files(self.folder, tuple(self.sizes))
        for name, size in self.sizes.items():
            if (held := files.size(name)) != size:
                raise self._changed(f"{self.folder / name} holds {held:,} bytes instead of {size:,}")
        return files

    def _column(self, name: str, kind: str, buffer: Callable[[str], pa.Buffer]) -> pa.Array:
        if kind in _TEXT:
            return pa.Array.from_buffers(
                _TEXT[kind], self.rows, [None, buffer(_bounds(name)), buffer(_values(name))], 0
            )
        numbers = pa.Array.from_buffers(_NUMBERS[kind], self.rows, [None, buffer(_values(name))], 0)
        if name not in self.dictionaries:
            return numbers
        # A check of the numbers would read them all.
        return pa.DictionaryArray.from_arrays(numbers, self.dictionaries[name], safe=False)

    def _near(self, name: str, kind: str, first: NDArray[np.int64], counts: NDArray[np.int64]) -> pa.Array:
        """The column's values in ``counts[i]`` rows from ``first[i]`` on, for each ``i``. Raises OSError."""
        rows = int(counts.sum())
        if kind not in _TEXT:
            width = _NUMBERS[kind].bit_width // 8
            return pa.Array.from_buffers(
                _NUMBERS[kind], rows, [None, self._read(_values(name), first * width, counts * width)], 0
            )
        width = np.dtype(np.int64).itemsize
        bounds = np.frombuffer(self._read(_bounds(name), first * width, (counts + 1) * width), np.int64)
        ends = np.cumsum(counts + 1)
        begins = ends - counts - 1
        values = self._read(_values(name), bounds[begins], bounds[ends - 1] - bounds[begins])
        sizes = np.delete(np.diff(bounds), ends[:-1] - 1)  # without those from one read to the next
        joined = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return pa.Array.from_buffers(_TEXT[kind], rows, [None, pa.py_buffer(joined), values], 0)

    def _read(self, name: str, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> pa.Buffer:
        """``sizes[i]`` bytes of a file from ``starts[i]`` on, for each ``i``, in a row. Raises OSError."""
        read = b"".join(self._files.read(name, starts.tolist(), sizes.tolist()))
        if len(read) != (wanted := int(sizes.sum())):
            raise self._changed(f"{self.folder / name} ends early: {len(read):,} bytes came instead of {wanted:,}")
        return pa.py_buffer(read)

    def _decoded(self, name: str, column: pa.Array) -> pa.Array:
        return self.dictionaries[name].take(column) if name in self.dictionaries else column

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Raise OSErrors as RunErrors."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"the index of this run cannot be read on the driver's machine: {self.folder}: {error.strerror or error}. The Ray "
                f"processes of that machine must see the folder, as this user: {REMEDY}."
            ) from None

    def _changed(self, how: str) -> RunError:
        return RunError(f"the index of this run has changed: {how}. Start the run again.")


class _Files:
    """The open files of a folder. They stay open as long as the object lives, also if the folder goes."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Raises OSError."""
        self._open: dict[str, int] = {}
        weakref.finalize(self, _close, self._open)
        for name in names:
            self._open[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)

    def size(self, name: str) -> int:
        """The bytes of a file."""
        return os.fstat(self._open[name]).st_size

    def read(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """These bytes of a file. Raises OSError."""
        file, pread = self._open[name], os.pread
        return [pread(file, size, start) for start, size in zip(starts, sizes, strict=True)]

    def mapped(self, name: str) -> mmap.mmap:
        """A file that is not empty, in memory. Raises OSError."""
        return mmap.mmap(self._open[name], 0, access=mmap.ACCESS_READ)


def _close(files: Mapping[str, int]) -> None:
    for file in files.values():
        os.close(file)


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
        self._columns = {column.name: str(column.type) for column in schema}
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
