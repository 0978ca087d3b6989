"""Read a run directory into columns. Damaged lines are left out and counted.

Where it stops: this module knows the files and their fields, not their meaning.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.errors import ConfigError
from offload.report.run_dir import EVENTS, METRICS, SKIPPED, SUMMARY

Floats = NDArray[np.float64]

COLUMNS = (
    "at", "epoch", "step", "seconds", "samples_per_s", "goodput", "input_ceiling_samples_per_s", "input_pace_samples_per_s",
    "device_ceiling_samples_per_s", "core_seconds_per_sample", "wire_bytes_per_sample", "variation", "blocked", "step_time_s",
    "data_wait_s", "peer_wait_s", "compute_s", "sync_s", "workers", "local_batch_size", "accum_steps", "global_batch_size",
    "preprocessing_cores", "useful", "goal",
)  # fmt: skip
LARGEST = 1e15  # numbers beyond it are no measurements, and would make an axis useless


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
        events: documents with a text ``event`` and a number ``at``, in their order.
        intervals: the measurements.
        skipped: skipped samples.
        notes: sentences about damaged files.
    """

    path: Path
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    intervals: Intervals
    skipped: list[dict[str, Any]]
    notes: tuple[str, ...] = ()


def read_run(path: Path) -> Records:
    """Read a run directory.

    Raises ConfigError if there is none, or a file cannot be read.
    """
    path = path.expanduser().absolute()
    names = (EVENTS, METRICS, SUMMARY)
    try:
        kind = os.stat(path).st_mode
        found = [name for name in names if (path / name).exists()] if stat.S_ISDIR(kind) else []
    except OSError as error:
        raise ConfigError(
            f"the run directory {path} cannot be read: {error.strerror}. Name the folder of a run, such as runs/demo."
        ) from None
    except ValueError:
        raise ConfigError(f"the run directory {str(path)!r} cannot be read: a path holds no such character.") from None
    if not stat.S_ISDIR(kind):
        raise ConfigError(f"{path} is no run directory but a file. Name the folder that holds {EVENTS}.")
    if not found:
        raise ConfigError(
            f"{path} is no run directory: it holds none of {', '.join(names)}. Name the folder of a run, such as runs/demo."
        )
    notes: list[str] = []
    events = list(_documents(path / EVENTS, notes, _is_event))
    intervals = _intervals(
        _documents(path / METRICS, notes, lambda each: _number(each.get("at")) == _number(each.get("at")))
    )
    skipped = list(_documents(path / SKIPPED, notes, lambda each: True))
    return Records(
        path=path,
        summary=_summary(path / SUMMARY, notes),
        events=events,
        intervals=intervals,
        skipped=skipped,
        notes=tuple(notes),
    )


def number(value: Any) -> float:
    """A finite number as a float; NaN for anything else."""
    return _number(value)


def text(value: Any, most: int = 2000) -> str:
    """A value as text of at most ``most`` characters; empty for None."""
    if value is None:
        return ""
    said = value if isinstance(value, str) else json.dumps(value, default=str)
    return said if len(said) <= most else said[: most - 1] + "…"


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if abs(found) <= LARGEST else math.nan


def _is_event(document: dict[str, Any]) -> bool:
    return isinstance(document.get("event"), str) and _number(document.get("at")) == _number(document.get("at"))


def _documents(path: Path, notes: list[str], valid: Any) -> Iterator[dict[str, Any]]:
    """The documents of a ``.jsonl`` file. A note counts the lines that are left out."""
    damaged: list[int] = []
    number = 0
    ended = True
    for number, line in enumerate(_lines(path), 1):
        ended = line.endswith(b"\n")
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            damaged.append(number)
            continue
        if isinstance(document, dict) and valid(document):
            yield document
        else:
            damaged.append(number)
    if damaged == [number] and not ended:
        notes.append(f"The last line of {path.name} is incomplete, as a crash leaves it. This report omits it.")
    elif damaged:
        which = ", ".join(str(each) for each in damaged[:5]) + (", …" if len(damaged) > 5 else "")
        notes.append(
            f"{path.name}: {len(damaged):,} damaged line{'s' if len(damaged) != 1 else ''} ({which}). This report omits them."
        )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would wait for a writer forever
            raise ConfigError(f"{path} is no ordinary file. Name the folder of a run.")
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        document = json.loads(b"".join(_lines(path)) or b"{}")
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        notes.append(f"{path.name} is not a JSON object. This report uses the other files alone.")
        return {}
    return document


def _intervals(documents: Iterator[dict[str, Any]]) -> Intervals:
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    metrics = _Sparse()
    cores, busy_s = _Sparse(), _Sparse()
    count = 0
    for document in documents:
        for name, column in columns.items():
            column.append(_number(document.get(name)))
        for name, value in _table(document.get("metrics")).items():
            metrics.set(str(name), count, value)
        for kind, group in _table(document.get("preprocessing")).items():
            cores.set(str(kind), count, _table(group).get("cores"))
            busy_s.set(str(kind), count, _table(group).get("busy_s"))
        count += 1
    return Intervals(
        columns={name: np.asarray(column, dtype=np.float64) for name, column in columns.items()},
        metrics=metrics.arrays(count),
        cores=cores.arrays(count),
        busy_s=busy_s.arrays(count),
    )


def _table(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


class _Sparse:
    """Columns that some lines lack."""

    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}

    def set(self, name: str, place: int, value: Any) -> None:
        self._places.setdefault(name, []).append(place)
        self._values.setdefault(name, []).append(_number(value))

    def arrays(self, count: int) -> dict[str, Floats]:
        found = {}
        for name, places in self._places.items():
            column = np.full(count, np.nan)
            column[places] = self._values[name]
            found[name] = column
        return found
