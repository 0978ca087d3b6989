"""Measures a row beside plain loops: what the benchmarks of whole tables of rows have in common.

A machine's speed drifts by a fifth within minutes. So the plain loop runs before and after every row, and the row is compared with the mean
of the two.
"""

import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks import side_by_side, tables
from benchmarks.rows.protocol import TOO_FEW, Task
from benchmarks.side_by_side import Measurement, Row, RowFailed

PLAIN = side_by_side.ROWS[0]
BATCH_SIZE = 64
MIN_BATCHES = 24  # the steady state has twelve of them
PLAIN_BATCHES = 10  # of the rows' size: with small ones malloc never learns to keep memory, and the loop is far slower
PLAIN_S = 8.0
MOST_SAMPLES = 1 << 24
UNDISTURBED = 0.97  # a plain loop that has its core to itself uses all of it
# START_S: for imports and the cluster's start, before a row's first sample. SLOWNESS: how many times slower than the plain loop a row may
# be before the benchmark gives it up.
START_S, SLOWNESS = 120.0, 10.0


def jpeg_files(folder: Path | None) -> str:
    """Return the folder of JPEG files to read. The first use makes the files; later ones keep them."""
    from benchmarks.workloads import jpeg_files

    return str(jpeg_files(folder or folder_of("jpeg")))


def folder_of(workload: str) -> Path:
    """The folder of a workload's files."""
    return Path(tempfile.gettempdir()) / f"offload-benchmark-{workload}"


def with_files(task: Task) -> Task:
    """The task with the folder of exactly its samples, if these are rows of files."""
    if task.workload not in tables.NAMES:
        return task
    return replace(task, data=str(tables.files(task.workload, Path(task.data or "."), task.samples)))


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One run of a row, and the runs of the plain loop just before and after it."""

    row: Row
    run: Measurement
    plain: tuple[Measurement, Measurement]
    ceiling: "Beside | None" = None
    """The same row with a consumer that only counts, if this run has a paced accelerator."""

    def __str__(self) -> str:
        told = f"{self.run.samples_per_s:.1f} samples/s, {self.delivered_over_ideal:.3f} of the ideal"
        if self.rate_over_ceiling is not None:
            told += f", {self.rate_over_ceiling:.3f} of the input ceiling, stall {self.run.stall:.1%}"
        return told

    @property
    def rate_over_ceiling(self) -> float | None:
        """The ratio of both rates, each relative to its own plain loops: the machine's speed may have changed in between."""
        return None if self.ceiling is None else self.delivered_over_ideal / self.ceiling.delivered_over_ideal

    @property
    def delivered_over_ideal(self) -> float:
        return self.run.samples_per_s / statistics.mean(ideal(self.row, plain) for plain in self.plain)

    @property
    def cpu_over_plain(self) -> float:
        return self.run.cpu_ms_per_sample / statistics.mean(plain.cpu_ms_per_sample for plain in self.plain)


def with_samples(task: Task, samples: int, least: int, unit: int | None = None) -> Task:
    """The task with so many samples: at least this number of batches, and whole units (default: files of rows, or batches)."""
    unit = unit or tables.ROWS_PER_FILE.get(task.workload, task.batch_size)
    return replace(task, samples=unit * math.ceil(max(least * task.batch_size, samples) / unit))


def calibrate(task: Task) -> float:
    """Samples/s of a plain loop on one core."""
    samples = PLAIN_BATCHES * task.batch_size
    while True:
        short = with_files(with_samples(task, samples, PLAIN_BATCHES))
        try:
            measured = side_by_side.run(PLAIN, short, timeout_s=START_S + SLOWNESS * 60)
        except RowFailed as error:
            if TOO_FEW not in str(error) or samples > MOST_SAMPLES:
                raise
            samples *= 4  # other programs interrupted a run of less than a second
            continue
        return measured.samples_per_s / len(PLAIN.hosts)


def plain_task(task: Task, per_s: float) -> Task:
    """The task of the plain loop beside rows, by its rate on one core."""
    return with_files(with_samples(task, round(PLAIN_S * per_s), PLAIN_BATCHES))


def plain_loop(task: Task, log: Console, memory_every_s: float | None = None) -> Measurement:
    """A run of the plain loop on both hosts."""
    run = side_by_side.run(PLAIN, task, timeout_s=START_S + SLOWNESS * 60, memory_every_s=memory_every_s)
    if run.busy_cores < UNDISTURBED * len(PLAIN.hosts):
        log.print(
            f"the plain loops got {run.busy_cores:.2f} of {len(PLAIN.hosts)} cores: other programs use them, so do not trust "
            "ratios to this run",
            style="yellow",
        )
    return run


def ideal(row: Row, plain: Measurement) -> float:
    """The plain loop's rate on the cores of a row."""
    return sum(plain.samples_per_s_by_host[host] for host in row.hosts)
