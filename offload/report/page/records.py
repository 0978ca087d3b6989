"""Read a run directory into columns. Damaged lines are left out and counted.

Where it stops: this module knows the files and their fields, not their meaning.
"""

from __future__ import annotations

import os
import stat
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.errors import ConfigError
from offload.report.events import RunEvent, read_event
from offload.report.json_values import number, table
from offload.report.run_dir import EVENTS, METRICS, SKIPPED, SUMMARY, absolute
from offload.report.run_tail import Lines, Look, Tail, parsed, tails_in

Floats = NDArray[np.float64]

COLUMNS = (
    "at", "epoch", "step", "seconds", "samples_per_s", "goodput", "input_ceiling_samples_per_s", "input_pace_samples_per_s",
    "device_ceiling_samples_per_s", "core_seconds_per_sample", "wire_bytes_per_sample", "variation", "blocked", "step_time_s",
    "data_wait_s", "peer_wait_s", "compute_s", "sync_s", "workers", "local_batch_size", "accum_steps", "global_batch_size",
    "preprocessing_cores", "useful", "goal",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The lines of ``metrics.jsonl``, in their order.

    Args:
        columns: one array of each field of ``COLUMNS``; NaN where a line lacks it.
        metrics: by name, the user's metrics; NaN likewise.
        cores, busy_s: by kind of node, its preprocessing cores, and the CPU seconds that they spent in the interval.
    """

    columns: dict[str, Floats]
    metrics: dict[str, Floats] = field(default_factory=dict)
    cores: dict[str, Floats] = field(default_factory=dict)
    busy_s: dict[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["at"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]


@dataclass(frozen=True, kw_only=True)
class Records:
    """Everything that a run directory holds.

    Args:
        path: the directory.
        summary: ``summary.json``; empty before the run's end.
        events: the events, in their order.
        lines: the same events, each as its line in the file.
        intervals: the measurements.
        skipped: skipped samples.
        notes: sentences about damaged files.
    """

    path: Path
    summary: dict[str, Any]
    events: list[RunEvent]
    lines: list[dict[str, Any]]
    intervals: Intervals
    skipped: list[dict[str, Any]]
    notes: tuple[str, ...] = ()


def read_run(path: Path) -> Records:
    """Read a run directory.

    Raises ConfigError if there is none, or a file cannot be read.
    """
    return RunReader(check_run_dir(path)).read()


def check_run_dir(path: Path) -> Path:
    """Return the absolute path of a run directory. Raises ConfigError if there is none."""
    path = absolute(path)
    names = (EVENTS, METRICS, SUMMARY)
    try:
        kind = os.stat(path).st_mode
        present = [name for name in names if (path / name).exists()] if stat.S_ISDIR(kind) else []
    except OSError as error:
        raise ConfigError(
            f"the run directory {path} cannot be read: {error.strerror}. Name the folder of a run, such as runs/demo."
        ) from None
    except ValueError:
        raise ConfigError(f"the run directory {str(path)!r} cannot be read: a path holds no such character.") from None
    if not stat.S_ISDIR(kind):
        raise ConfigError(f"{path} is no run directory but a file. Name the folder that holds {EVENTS}.")
    if not present:
        raise ConfigError(
            f"{path} is no run directory: it holds none of {', '.join(names)}. Name the folder of a run, such as runs/demo."
        )
    return path


class RunReader:
    """A reader of a run that grows: each :meth:`read` parses only what is new.

    ``look``: reads the files; by default, those in ``path`` on this host.
    """

    def __init__(self, path: Path, look: Look | None = None) -> None:
        self._path, self._look = path, look or tails_in(path)
        self._start()

    def _start(self) -> None:
        self._events, self._intervals = Lines(EVENTS, _is_event), Lines(METRICS, _has_time)
        self._skipped = Lines(SKIPPED, lambda line: True)
        self._read: list[RunEvent] = []
        self._columns = _Columns()

    def read(self) -> Records:
        """The run as it is now. Raises what ``look`` raises."""
        files = (self._events, self._intervals, self._skipped)
        more = True
        while more:
            tails = self._look({file.name: file.offset for file in files})
            if any(file.replaced(tails.get(file.name)) for file in files):  # another run has taken the directory
                self._start()
                return self.read()
            more = any(file.take(tails.get(file.name)) for file in files)
        self._read += map(read_event, self._events.fresh())
        for document in self._intervals.fresh():
            self._columns.add(document)
        notes = [note for file in files if (note := file.note())]
        summary = _summary(tails.get(SUMMARY), notes)
        return Records(
            path=self._path,
            summary=summary,
            events=self._read.copy(),
            lines=self._events.documents.copy(),
            intervals=self._columns.intervals(),
            skipped=self._skipped.documents.copy(),
            notes=tuple(notes),
        )


def _is_event(document: dict[str, Any]) -> bool:
    return isinstance(document.get("event"), str) and _has_time(document)


def _has_time(document: dict[str, Any]) -> bool:
    return number(document.get("at")) == number(document.get("at"))


def _summary(tail: Tail | None, notes: list[str]) -> dict[str, Any]:
    try:
        document = parsed((tail and tail.data) or b"{}")
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        notes.append(f"{SUMMARY} is not a JSON object. This report uses the other files alone.")
        return {}
    return document


class _Columns:
    """The lines of ``metrics.jsonl`` as growing columns."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in COLUMNS}
        self._metrics, self._cores, self._busy_s = _Sparse(), _Sparse(), _Sparse()
        self._count = 0

    def add(self, document: dict[str, Any]) -> None:
        """Add a line."""
        for name, column in self._columns.items():
            column.append(number(document.get(name)))
        for name, value in table(document.get("metrics")).items():
            self._metrics.set(str(name), self._count, value)
        for kind, group in table(document.get("preprocessing")).items():
            self._cores.set(str(kind), self._count, table(group).get("cores"))
            self._busy_s.set(str(kind), self._count, table(group).get("busy_s"))
        self._count += 1

    def intervals(self) -> Intervals:
        """All lines so far."""
        return Intervals(
            columns={name: np.array(column, dtype=np.float64) for name, column in self._columns.items()},
            metrics=self._metrics.arrays(self._count),
            cores=self._cores.arrays(self._count),
            busy_s=self._busy_s.arrays(self._count),
        )


class _Sparse:
    """Columns that some lines lack."""

    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}

    def set(self, name: str, place: int, value: Any) -> None:
        self._places.setdefault(name, []).append(place)
        self._values.setdefault(name, []).append(number(value))

    def arrays(self, count: int) -> dict[str, Floats]:
        columns = {}
        for name, places in self._places.items():
            column = np.full(count, np.nan)
            column[places] = self._values[name]
            columns[name] = column
        return columns
