"""What the rows of several libraries share: the data set in the library's own format, and the answer.

A conversion runs once, outside the measured time, in the row's process and on its core. The folder keeps its result and its seconds, so
that each later run reports them too. A set of shards is as long as a task needs, but holds links to the shards of one pass: a library
reads each of them as a file of its own.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks import tables
from benchmarks.rows import protocol

SHARD = 320
"""Samples in a shard of images: five batches, 27 MB of JPEG files. The benchmark's sets of images consist of whole shards."""
_REPORT = "conversion.json"


def cores() -> int:
    """The number of cores to which the row is pinned, and thus of its preprocessing processes or threads."""
    return len(os.sched_getaffinity(0))


def converted(task: protocol.Task, name: str, write: Callable[[Path], None]) -> tuple[Path, float]:
    """Return the folder of the data set in a format of this name, and the seconds that the conversion took. `write` makes it once."""
    # The ids of synthetic images are a set of their own for each number of samples; files are the same for all tasks.
    size = f"-{task.samples}" if task.workload not in ("jpeg", *tables.NAMES) else ""
    folder = protocol.folder(task).parent / f"as-{name}-{task.workload}{size}"
    if not (folder / _REPORT).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        write(folder)
        (folder / _REPORT).write_text(json.dumps({"seconds": time.monotonic() - began}))
    return folder, float(json.loads((folder / _REPORT).read_text())["seconds"])


def repeated(task: protocol.Task, shards: Sequence[Path], folder: Path, per_shard: int = SHARD) -> list[Path]:
    """Make a folder with as many links to the shards of one pass, in turns, as the task has samples. Return the links."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    links = []
    for number in range(task.samples // per_shard):
        shard = shards[number % len(shards)]
        links.append(folder / f"{number:05}{shard.suffix}")
        links[-1].hardlink_to(shard)
    return links


def rows_of(task: protocol.Task) -> Iterator[dict[str, Any]]:
    """Yield the rows of one Parquet file of the task, for formats that store rows."""
    table = pq.read_table(next(protocol.folder(task).glob("*.parquet")))
    columns = [table[name].to_pylist() if name == "text" else table[name].to_numpy() for name in table.column_names]
    for row in zip(*columns, strict=True):
        yield dict(zip(table.column_names, row, strict=True))


class Rows:
    """Makes a batch of single rows of a table, for libraries that store rows. Picklable."""

    def __init__(self, name: str, convert: Callable[[Any], Any] = np.asarray) -> None:
        """Args: convert makes a column of the batch of an array."""
        self._name = name
        self._convert = convert

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        columns = {name: column if name == "text" else np.asarray(column) for name, column in columns.items()}
        return {name: self._convert(column) for name, column in tables.TRANSFORMS[self._name](columns).items()}


def answer(
    task: protocol.Task,
    request: Callable[[], Iterable[Mapping[str, Any]]],
    conversion_s: float = 0.0,
) -> None:
    """Measure the batches, and answer."""
    result = protocol.consume(task, request)
    protocol.answer(replace(result, extra={**result.extra, "conversion_s": conversion_s}))
