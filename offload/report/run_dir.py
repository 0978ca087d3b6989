"""The run directory, which holds everything that a run leaves behind, in files that other programs can read.

``events.jsonl`` begins with ``run_started`` and ends with ``run_finished``, after which only a ``callback_failed`` may come.
``metrics.jsonl`` has a line per interval. The run writes ``summary.json`` at its end. A new run resumes an unfinished run in the
directory, and refuses a finished one. A lock keeps a second run out: it would mix its files with those of the first, or remove its
checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from offload.errors import ConfigError, RunError, argument
from offload.process import forks
from offload.report.events import CheckpointWritten, RunEvent, RunStarted, WorkerLost, WorkersResumed, read_event

SUMMARY = "summary.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
SKIPPED = "skipped.jsonl"
PRINTED = "printed.jsonl"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"  # folder of the TensorBoard callback
_LOCK = ".offload.lock"
_OWN = (SUMMARY, EVENTS, METRICS, SKIPPED, PRINTED, REPORT, CHECKPOINTS, "error.txt")


def to_json(document: Any, *, indent: int | None = None) -> str:
    """JSON without Infinity or NaN: they become null."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def absolute(path: Path) -> Path:
    """The absolute path of a run directory, in which ``~`` and ``~user`` stand for home folders.

    Raises ConfigError if there is no such home folder, or the path is a URI: events and reports need a local folder.
    """
    if scheme := re.match(r"([a-z][a-z0-9+.-]*):/", str(path)):  # Path("s3://bucket") has one slash left
        raise ConfigError(
            f"{argument('run_dir')} must be a folder of this machine, found {scheme[1]}://{str(path)[scheme.end() :].lstrip('/')}. "
            f"Checkpoints alone may go elsewhere: {argument('storage_path', 's3://bucket/runs')}."
        )
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"the run directory {path} cannot be found: nobody knows the home folder {path.parts[0]}. Write its path in full."
        ) from None


class RunDirectory:
    """One run's directory. Its content does not change before :meth:`begin`.

    Raises ConfigError if it cannot be written, or holds a finished run without ``overwrite``.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = absolute(path)
        finished = self._finished_before()
        if finished and not overwrite:
            raise ConfigError(
                f"{self.path} holds a finished run. Pass {argument('overwrite', True)} to replace it, or choose another "
                f"{argument('run_dir')}."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write-test"
            probe.write_bytes(b"\0" * 65536)
            probe.unlink()
            for name in (EVENTS, METRICS, SKIPPED, PRINTED):
                if (self.path / name).exists():
                    (self.path / name).open("ab").close()
        except OSError as error:
            raise self._unwritable(error) from None
        self._overwrite = overwrite
        self.resuming = not overwrite and (self.path / EVENTS).exists()

    def begin(self) -> None:
        """Begin the run: remove an old run that the user overwrites, and end lines that a crash cut off.

        Raises ConfigError if the files cannot be written."""
        try:
            if self._overwrite:
                self._clear()
            for name in (EVENTS, METRICS, SKIPPED, PRINTED):
                self._end_last_line(name)
        except OSError as error:
            raise self._unwritable(error) from None

    def committed_step(self) -> int | None:
        """The step of the newest checkpoint that the directory's run certainly stored; None if it stored none.

        If training did not wait for a checkpoint, it is certain once the next one has begun, or a run has resumed.
        """
        certain: int | None = None
        under_way: int | None = None
        for event in map(read_event, read_lines(self.path / EVENTS)):
            if isinstance(event, RunStarted | WorkerLost):
                under_way = None
            elif isinstance(event, CheckpointWritten | WorkersResumed):
                stored = isinstance(event, WorkersResumed) or event.waited
                certain = event.step if stored else certain if under_way is None else under_way
                under_way = None if stored else event.step
        return certain

    def event(self, event: RunEvent) -> None:
        """Append to ``events.jsonl``."""
        self._append(EVENTS, event.to_json())

    def metrics(self, values: dict[str, Any]) -> None:
        """Append to ``metrics.jsonl``."""
        self._append(METRICS, values)

    def skipped(self, values: dict[str, Any]) -> None:
        """Append to ``skipped.jsonl``, the list of skipped samples."""
        self._append(SKIPPED, values)

    def printed(self, values: dict[str, Any]) -> None:
        """Append to ``printed.jsonl``, what data sets and transforms print."""
        self._append(PRINTED, values)

    def summary(self, document: dict[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all."""
        self.write(SUMMARY, to_json(document, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write one file of the directory, whole or not at all."""
        part = self.path / f".{name}.part"
        try:
            # An error may name a file whose name is not Unicode.
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(part, self.path / name)
        except OSError as error:
            raise self._failed(error) from None

    def _append(self, name: str, document: dict[str, Any]) -> None:
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(to_json(document) + "\n")
        except OSError as error:
            raise self._failed(error) from None

    def _end_last_line(self, name: str) -> None:
        """End a last line that a crash cut off, so that appended text does not continue it."""
        try:
            with open(self.path / name, "rb+") as file:
                if file.seek(0, os.SEEK_END) == 0:
                    return
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        except FileNotFoundError:
            pass

    def _failed(self, error: OSError) -> RunError:
        if not self.path.is_dir():
            return RunError(f"the run directory {self.path} was removed during the run.")
        return RunError(
            f"cannot write to the run directory {self.path}: {error.strerror}. Free space there; the same command resumes "
            "from the last checkpoint."
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write to the run directory {self.path}: {error.strerror}. Free space there or allow writing, or "
            f"choose another {argument('run_dir')}."
        )

    def _finished_before(self) -> bool:
        try:
            document = json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(document, dict) and document.get("status") == "finished"

    def _clear(self) -> None:
        # Remove only a run's own files, and only if one ran here: a user may keep other files beside them.
        if not (self.path / EVENTS).exists():
            return
        for name in _OWN:
            target = self.path / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        board = self.path / TENSORBOARD  # TensorBoard shows all that a folder holds as one run
        for events in () if board.is_symlink() else board.glob("events.out.tfevents.*"):
            events.unlink(missing_ok=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The documents of a ``.jsonl`` file; none if it is missing. The list omits damaged lines, such as a last one that a crash cut off."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    documents = []
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            documents.append(document)
    return documents


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that holds the lock of a run directory.

    The operating system frees the lock with the process that holds it, however that ends, and whatever its forks still do. File systems
    without locks get none.

    Raises ConfigError if another run holds it.
    """
    path = folder / _LOCK
    file = _open_locked(path)
    try:
        yield
    finally:
        if file is not None and not file.closed:  # a fork has closed it
            with contextlib.suppress(OSError):  # before the lock is free: later it may be another's
                path.unlink()
            file.close()


def _open_locked(path: Path) -> IO[bytes] | None:
    """The lock's file, or None where it cannot be locked."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:  # its holder has ended just now, and removed it
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = os.pread(fd, 1000, 0).decode(errors="replace") or "another process"
            os.close(fd)
            raise ConfigError(
                f"a run trains in {path.parent} already: {holder}. Wait until it ends, or choose another {argument('run_dir')}."
            ) from None
        except OSError:
            os.close(fd)
            return None
        return forks.locked_file(fd)
