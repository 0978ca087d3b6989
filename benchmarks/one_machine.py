"""Whole scripts of one machine: a plain loop, torch's DataLoader, offload's DataLoader and Trainer, without Ray and with it.

    python benchmarks/one_machine.py --repeats 5 -o benchmarks/results/one_machine.json

Each repeat starts every row once, one after the other, as a Python process of its own. From the start of the process it measures the
imports, the first batch, the rate and the CPU time of the steady state (40 to 90 % of the batches), the memory of all its processes there
(proportional set size), and the time from the last batch to the end of the process. A Trainer's first batch counts once its step is done.
Figures are medians, and ratios to torch's DataLoader are medians over the ratios of each repeat: a machine's speed drifts.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side, tables, workloads
from benchmarks.rows import protocol

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("plain", "torch", "offload", "offload-ray", "trainer", "trainer-ray")
WORKLOADS = ("jpeg", "blur", "blur-uint8", "tabular", "text")
MEASURES = ("imports_s", "first_batch_s", "samples_per_s", "cpu_ms_per_sample", "memory_mb", "end_s")
TIMEOUT_S = 900


@click.command()
@click.option("--workload", "names", multiple=True, type=click.Choice(WORKLOADS), help="[default: all]")
@click.option("--row", "rows", multiple=True, type=click.Choice(ROWS), help="[default: all]")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--seconds", default=6.0, show_default=True, type=click.FloatRange(min=1), help="Of each row, about.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the result to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    names: tuple[str, ...], rows: tuple[str, ...], repeats: int, seconds: float, output: Path | None, as_json: bool
) -> None:
    """Compare whole scripts on one machine."""
    cores = len(os.sched_getaffinity(0))
    table: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in names or WORKLOADS:
            task = _task(workload, seconds, cores, Path(folder))
            runs: list[dict[str, dict[str, float]]] = []
            for repeat in range(repeats):
                order = [*(rows or ROWS)]
                runs.append({row: _run(row, task, cores) for row in (order if repeat % 2 else order[::-1])})
                sums = {(one["samples"], one["label_sum"]) for one in runs[-1].values()}
                if len(sums) != 1:
                    raise click.ClickException(f"{workload}: the rows read different samples: {runs[-1]}")
                click.echo(f"{workload} {repeat + 1}/{repeats}", err=True)
            table[workload] = {row: _summary(row, runs) for row in rows or ROWS}
            result = {
                "benchmark": "one_machine",
                "claim": "whole scripts on one machine: offload without a cluster beside torch's DataLoader",
                "command": " ".join(["python", "benchmarks/one_machine.py", *sys.argv[1:]]),
                "machine": side_by_side.hardware(),
                "versions": side_by_side.versions(),
                "repeats": repeats,
                "workers": cores,
                "rows": table,
            }
            if output is not None:  # after each workload: a run that is cut short leaves those that it has measured
                output.write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(result))
    else:
        _show(table)


def _task(workload: str, seconds: float, cores: int, folder: Path) -> protocol.Task:
    """So many samples that plain loops on all cores take these seconds."""
    if workload in tables.NAMES:
        rows = tables.ROWS_PER_FILE[workload]
        path = tables.files(workload, folder, rows)
        batches = tables.Batches(workload, path, tables.BATCH_SIZES[workload])
        began = time.perf_counter()
        seen = sum(len(batch["label"]) for batch in batches.of(batches.groups()[:1]))
        files = max(1, round(seconds * cores * seen / (time.perf_counter() - began) / rows))
        path = tables.files(workload, folder, files * rows)
        return protocol.Task(
            workload=workload, samples=files * rows, batch_size=tables.BATCH_SIZES[workload], data=str(path)
        )
    data = workloads.jpeg_files(folder / "jpeg") if workload == "jpeg" else None
    work = workloads.get(workload, data)
    work.make(0)
    began = time.perf_counter()
    for number in range(16):
        work.make(number)
    samples = int(seconds * cores * 16 / (time.perf_counter() - began))
    return protocol.Task(workload=workload, samples=max(samples, 20 * 64), data=None if data is None else str(data))


def _run(row: str, task: protocol.Task, cores: int) -> dict[str, float]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"RAY_TMPDIR": "/tmp"}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.jobs.one_machine_row", f"--row={row}", f"--workers={cores}", *task.argv()],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    ended = time.monotonic()
    if process.returncode:
        raise click.ClickException(f"{row} on {task.workload} failed:\n{err[-2000:]}")
    answer = next(line for line in out.splitlines() if line.startswith(protocol.ANSWER))
    told: dict[str, float] = json.loads(answer.removeprefix(protocol.ANSWER))
    return told | {"end_s": ended - told["last_batch_at"]}


def _summary(row: str, runs: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Medians, and the median ratios to torch's DataLoader; that of the CPU time is to the plain loop's, too."""
    measured = [name for name in MEASURES if name in runs[0][row]]  # a Trainer's worker tells only its own
    medians = {name: round(statistics.median(run[row][name] for run in runs), 4) for name in measured}
    for name in ("first_batch_s", "samples_per_s", "cpu_ms_per_sample", "memory_mb"):
        if "torch" in runs[0] and name in measured:
            medians[f"{name}_over_torch"] = _ratio(row, "torch", name, runs)
    if "plain" in runs[0] and "cpu_ms_per_sample" in measured:
        medians["cpu_over_plain"] = _ratio(row, "plain", "cpu_ms_per_sample", runs)
    return medians


def _ratio(row: str, other: str, name: str, runs: list[dict[str, dict[str, float]]]) -> float:
    return round(statistics.median(run[row][name] / run[other][name] for run in runs), 3)


def _show(table: dict[str, dict[str, Any]]) -> None:
    shown = Table(title="Whole scripts on one machine")
    columns = ("first_batch_s", "samples_per_s", "cpu_ms_per_sample", "memory_mb", "end_s", "first_batch_s_over_torch",
               "samples_per_s_over_torch", "cpu_over_plain", "memory_mb_over_torch")  # fmt: skip
    for column in ("workload", "row", *columns):
        shown.add_column(column)
    for workload, rows in table.items():
        for row, figures in rows.items():
            shown.add_row(workload, row, *(f"{figures.get(column, float('nan')):.4g}" for column in columns))
    Console(width=200).print(shown)


if __name__ == "__main__":
    main()
