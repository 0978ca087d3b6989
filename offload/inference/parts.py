"""What a prediction leaves on disk: parts while it is under way, then one Parquet file, whole or not at all.

The folder ``OUTPUT.parts`` holds a manifest of the arguments, and parts: Arrow files with the results of some tasks each. A part counts
once it has its name, which it gets when it is complete. So a prediction that is killed loses seconds of work, and the next one goes on
with the tasks that no part holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offload.errors import ConfigError, RunError, argument
from offload.inference.model_worker import Answer
from offload.inference.results import fitted, unified
from offload.pipeline.blocks.wire import SAMPLE_ID
from offload.process import forks

MANIFEST = "manifest.json"
SUFFIX = ".parts"
FLUSH_S = 5.0  # the work that a killed prediction may lose
FLUSH_BYTES = 64 << 20
GROUP_ROWS = 1 << 16  # rows of a row group of the output
_ABOUT = b"offload.prediction"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A sample without results, and why."""

    sample_id: int
    reason: str


class Parts:
    """The parts of one prediction, for one process at a time.

    Args:
        output: the file that the prediction will write.
        manifest: the arguments on which the results depend, by the words for them.
        overwrite: whether to replace an output, and parts of other arguments.

    Raises:
        ConfigError: from :meth:`opened`, if the output exists, cannot be written, or another process predicts it; and for parts of other
            arguments.
    """

    def __init__(self, output: Path, manifest: Mapping[str, Any], *, overwrite: bool) -> None:
        self._output, self._manifest, self._overwrite = output, dict(manifest), overwrite
        self._folder = output.with_name(output.name + SUFFIX)
        self._places: dict[int, tuple[Path, int] | None] = {}
        self._waiting: list[Answer] = []
        self._waiting_bytes, self._flushed_at = 0, time.monotonic()
        self._schema: pa.Schema | None = None
        self._next = 0
        self.skipped: list[Reason] = []
        """The samples without results, of the parts so far."""
        self.rows = 0
        """The rows of the parts so far."""

    @property
    def done(self) -> set[int]:
        """The numbers of the tasks that parts hold."""
        return set(self._places)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return [SAMPLE_ID] if self._schema is None else list(self._schema.names)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Parts]:
        """A context in which this process alone writes the parts. It finds the complete ones of an earlier prediction."""
        check_output(self._output, overwrite=self._overwrite)
        with _beginning(self._folder):
            self._folder.mkdir(exist_ok=True)
            lock = _locked(self._folder / ".lock", self._output)
        try:
            with _beginning(self._folder):
                self._begin()
            yield self
            self.flush()
        finally:
            with contextlib.suppress(OSError):
                lock.close()

    def _begin(self) -> None:
        path = self._folder / MANIFEST
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = None
        if self._overwrite or not isinstance(before, dict):
            for part in self._folder.glob("part-*"):
                part.unlink()
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(self._manifest, indent=2), encoding="utf-8")
            partial.replace(path)
            return
        for name, value in self._manifest.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{self._folder} holds an interrupted prediction of other arguments: {name} was {before.get(name)}, and is {value}. "
                    f"Repeat that command to complete it, pass {argument('overwrite', True)} to begin again, or choose another "
                    f"{argument('output')}."
                )
        for part in sorted(self._folder.glob("part-*.arrow")):
            self._find(part)

    def _find(self, part: Path) -> None:
        """Note a part of an earlier prediction. One that cannot be read is made again: a crash of the machine may have cut it off."""
        try:
            with pa.memory_map(str(part)) as file:
                reader = pa.ipc.open_file(file)
                about = json.loads(reader.schema.metadata[_ABOUT])
                rows = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
            part.unlink()
            return
        self._note(part, about)
        if about["tasks"]:
            self._unify(reader.schema.remove_metadata())
        self.rows += rows
        self._next = max(self._next, int(part.stem.partition("-")[2]) + 1)

    def _note(self, part: Path, about: Mapping[str, Any]) -> None:
        self._places.update({number: (part, place) for place, number in enumerate(about["tasks"])})
        self._places.update(dict.fromkeys(about["empty"]))
        self.skipped += [Reason(sample_id=number, reason=reason) for number, reason in about["skipped"]]

    def add(self, answer: Answer) -> None:
        """Add the results of a task. They are on disk after :meth:`flush`, which this calls now and then.

        Raises RunError for results unlike those before them, and if the disk is full.
        """
        if answer.batch is not None:
            self._unify(answer.batch.schema)
            self._waiting_bytes += answer.batch.nbytes
            self.rows += answer.batch.num_rows
        self._waiting.append(answer)
        if time.monotonic() - self._flushed_at > FLUSH_S or self._waiting_bytes > FLUSH_BYTES:
            self.flush()

    def _unify(self, schema: pa.Schema) -> None:
        """Let the output hold results of this schema, too. Raises RunError for results unlike those before them."""
        self._schema = schema if self._schema is None else unified(self._schema, schema)

    def flush(self) -> None:
        """Write what waits as one part. Raises RunError if that is impossible."""
        if self._waiting:
            filled = [answer for answer in self._waiting if answer.batch is not None]
            about = {
                "tasks": [answer.number for answer in filled],
                "empty": [answer.number for answer in self._waiting if answer.batch is None],
                "skipped": [(s.sample_id, s.reason) for answer in self._waiting for s in answer.skipped],
            }
            schema = self._schema or pa.schema([])
            batches = [fitted(answer.batch, schema) for answer in filled]
            described = schema.with_metadata({_ABOUT: json.dumps(about).encode()})
            part = self._folder / f"part-{self._next:06d}.arrow"
            partial = part.with_suffix(".partial")
            with _writing(partial):
                with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, described) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                _sync(partial)
                partial.replace(part)
            self._next += 1
            self._note(part, about)
            self._waiting.clear()
        self._waiting_bytes, self._flushed_at = 0, time.monotonic()

    def finish(self) -> None:
        """Join all parts in the output, in the order of tasks, and remove them. Raises RunError if the disk is full."""
        self.flush()
        partial = self._folder / "output.partial"
        schema = self._schema or pa.schema([(SAMPLE_ID, pa.int64())])  # if all samples were skipped
        with _writing(self._output):
            with pq.ParquetWriter(partial, schema) as writer:
                for table in self._groups(schema):
                    writer.write_table(table, row_group_size=GROUP_ROWS)
            _sync(partial)
            partial.replace(self._output)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _groups(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """The rows in order, in tables of about GROUP_ROWS."""
        readers: dict[Path, Any] = {}
        group: list[pa.RecordBatch] = []
        rows = 0
        for number in sorted(self._places):
            place = self._places[number]
            if place is None:
                continue
            part, index = place
            if part not in readers:
                readers[part] = pa.ipc.open_file(pa.memory_map(str(part)))
            batch = readers[part].get_batch(index)
            group.append(fitted(pa.RecordBatch.from_arrays(batch.columns, names=batch.schema.names), schema))
            rows += batch.num_rows
            if rows >= GROUP_ROWS:
                yield pa.Table.from_batches(group, schema)
                group, rows = [], 0
        if group:
            yield pa.Table.from_batches(group, schema)


def output_path(path: str | Path) -> Path:
    """The file's absolute path. Raises ConfigError for the home of an unknown user."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{argument('output')} {path} cannot be found: nobody knows the home folder {Path(path).parts[0]}. Write its path in full."
        ) from None


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if a prediction cannot write this file."""
    with _beginning(output):
        _check_output(output, overwrite=overwrite)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.suffix != ".parquet":
        raise ConfigError(
            f"{argument('output')} must be a Parquet file, found {output}. Name it {output.stem or 'out'}.parquet."
        )
    if output.is_dir():
        raise ConfigError(f"{output} is a folder. Name a file, such as {output / 'out.parquet'}.")
    if output.exists() and not overwrite:
        raise ConfigError(
            f"{output} exists. Pass {argument('overwrite', True)} to replace it, or choose another {argument('output')}."
        )
    if not (output.parent.is_dir() and os.access(output.parent, os.W_OK)):
        raise ConfigError(f"{output} cannot be written: {output.parent} is not a writable folder.")


@contextlib.contextmanager
def _beginning(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}. Correct that, or choose another {argument('output')}."
        ) from None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RunError(
            f"{path} cannot be written: {reason}. Free space there; the same command goes on where this one ended."
        ) from None


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _locked(path: Path, output: Path) -> Any:
    """The lock's file, which the operating system unlocks with the end of this process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 1000, 0).decode(errors="replace") or "another process"
        os.close(fd)
        raise ConfigError(
            f"{output} is being predicted already, by {holder}. Wait until it ends, or choose another "
            f"{argument('output')}."
        ) from None
    except OSError:  # a file system without locks
        return forks.locked_file(fd)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return forks.locked_file(fd)
