"""One instance against many: the same data through a plain loop, DataLoader, a Ray script and offload, side by side.

    python benchmarks/offload_vs_single.py --workload jpeg --repeats 3 --json -o result.json

Two emulated hosts on two pinned cores stand for a GPU instance and a CPU instance, one core of each. The *ideal* is the rate of plain
loops on these cores, measured on both at the same time. `delivered_over_ideal` compares a row with the ideal of the cores that it has. A
machine's speed drifts by a fifth within minutes, so the plain loop runs before and after every row, and the row is compared with the mean
of the two. Repeats are interleaved, and every figure is the median over them. No GPU is involved: the consumer only counts, or is a paced
accelerator if --alpha and --beta, or --pace, ask for one.
"""

import json
import shlex
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import reference, side_by_side, tables
from benchmarks.reference import Beside
from benchmarks.rows.protocol import Task
from benchmarks.side_by_side import CPU_HOST, GPU_HOST, Measurement, Row, RowFailed
from tests.emulation import HostsError, unavailable

WORKLOADS = ("blur", "blur-uint8", "jpeg", *tables.NAMES)
PLAIN_WIDTH = 130

# USD per hour of one vCPU: AWS's list prices of SageMaker training in us-east-1, divided by the vCPUs of the instance.
USD_PER_HOUR = {GPU_HOST: 1.408 / 4, CPU_HOST: 0.816 / 16}  # ml.g5.xlarge, ml.c5.4xlarge

# The first keys of a row of the result, in this order; more keys may follow.
COLUMNS = (
    "name",
    "workload",
    "samples_per_s",
    "first_batch_s",
    "cpu_ms_per_sample",
    "stall",
    "delivered_over_ideal",
    "usd_per_million_samples",
)


@click.command()
@click.option("--workload", "workloads", multiple=True, type=click.Choice(WORKLOADS), help="[default: all]")
@click.option("--rows", "names", multiple=True, type=click.Choice([row.name for row in side_by_side.ROWS[1:]]),
              help="Rows to run in addition to plain. [default: all]")  # fmt: skip
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--seconds",
    default=40.0,
    type=click.FloatRange(min=0, min_open=True),
    show_default=True,
    help="Approximate time that each row runs at the ideal rate.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=reference.MIN_BATCHES * reference.BATCH_SIZE),
    help="Samples per host; replaces --seconds.",
)
@click.option("--alpha", default=0.0, type=click.FloatRange(min=0), help="Paced accelerator: seconds per batch.")
@click.option("--beta", default=0.0, type=click.FloatRange(min=0), help="Paced accelerator: seconds per sample.")
@click.option(
    "--pace",
    type=click.FloatRange(min=0, min_open=True),
    help="Paced accelerator at this multiple of the row's input ceiling. A run of the row with a consumer that only counts "
    "measures the ceiling just before.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), help="Folder of the files to read; missing files are made there."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(
    workloads: tuple[str, ...],
    names: tuple[str, ...],
    repeats: int,
    seconds: float,
    samples: int | None,
    alpha: float,
    beta: float,
    pace: float | None,
    data: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Compare one host with two, and offload with the tools that people use today."""
    if (reason := unavailable()) is not None:
        raise click.ClickException(reason)
    if pace is not None and (alpha or beta):
        raise click.UsageError("--pace sets the accelerator's speed: leave --alpha and --beta out")
    chosen = workloads or WORKLOADS
    rows = [row for row in side_by_side.ROWS if row is not reference.PLAIN and (not names or row.name in names)]
    log = Console(stderr=True)
    tasks: dict[str, Task] = {}
    plain_tasks: dict[str, Task] = {}
    for workload in chosen:
        folder = reference.jpeg_files(data) if workload == "jpeg" else str(data or reference.folder_of(workload))
        task = Task(
            workload=workload, samples=0, batch_size=tables.BATCH_SIZES.get(workload, reference.BATCH_SIZE), data=folder
        )
        per_s = reference.calibrate(task)
        tasks[workload] = reference.with_samples(task, samples or round(seconds * per_s), reference.MIN_BATCHES)
        plain_tasks[workload] = reference.plain_task(task, per_s)
        log.print(f"{workload}: {tasks[workload].samples} samples per host and row")

    measured: dict[tuple[str, str], list[Beside]] = defaultdict(list)
    failed: dict[tuple[str, str], str] = {}
    for repeat in range(repeats):
        for workload in chosen:
            before = reference.plain_loop(plain_tasks[workload], log)
            for row in rows:
                if (workload, row.name) in failed and not measured[workload, row.name]:
                    continue  # the row does not work at all
                ceiling: Beside | None = None
                # A consumer that only counts measures the ceiling; the accelerator's pace is a multiple of it.
                for paced in (False, True) if pace is not None else (True,):
                    task = replace(tasks[workload], samples=tasks[workload].samples * len(row.hosts))
                    task = reference.with_files(task)
                    if paced:
                        task = replace(task, alpha_s=alpha, beta_s=_beta(row, before, beta, pace, ceiling))
                    try:
                        run = side_by_side.run(row, task, timeout_s=reference.START_S + reference.SLOWNESS * seconds)
                    except (RowFailed, HostsError) as error:
                        failed[workload, row.name] = str(error)
                        log.print(f"{workload} {row.name}: {error}", style="red", markup=False)
                        break
                    after = reference.plain_loop(plain_tasks[workload], log)
                    beside = Beside(row=row, run=run, plain=(before, after), ceiling=ceiling)
                    log.print(f"{repeat + 1}/{repeats} {workload} {row.name}: {beside}", markup=False)
                    before, ceiling = after, beside
                else:
                    measured[workload, row.name].append(beside)

    result = {
        "rows": [line for workload in chosen for line in _lines(workload, rows, measured)],
        "failed": [{"workload": workload, "name": name, "reason": why} for (workload, name), why in failed.items()],
        "accelerator": _accelerator(alpha, beta, pace),
        "samples_per_host": {workload: task.samples for workload, task in tasks.items()},
        "batch_size": {workload: task.batch_size for workload, task in tasks.items()},
        "repeats": repeats,
        "command": shlex.join(["python", "benchmarks/offload_vs_single.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }  # fmt: skip
    text = json.dumps(result, indent=1, allow_nan=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        # A file or a pipe has no width of its own: give the table the width that it needs.
        console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        console.print(_table(result))
    if failed:
        sys.exit(1)


def _beta(row: Row, plain: Measurement, beta: float, pace: float | None, ceiling: Beside | None) -> float:
    """The accelerator's seconds per sample."""
    if pace is None or ceiling is None:
        return beta
    return 1 / (pace * ceiling.delivered_over_ideal * reference.ideal(row, plain))


def _lines(workload: str, rows: list[Row], measured: dict[tuple[str, str], list[Beside]]) -> list[dict[str, Any]]:
    """The lines of one workload: the plain loop over all of its runs, then each row that ran."""
    besides = [beside for row in rows for beside in measured[workload, row.name]]
    if not besides:
        return []
    plain = _line(reference.PLAIN, workload, [beside.plain[0] for beside in besides])
    lines = [{**plain, "delivered_over_ideal": 1.0, "cpu_over_plain": 1.0}]
    for row in rows:
        if ran := measured[workload, row.name]:
            ratios = {
                "delivered_over_ideal": statistics.median(beside.delivered_over_ideal for beside in ran),
                "cpu_over_plain": statistics.median(beside.cpu_over_plain for beside in ran),
            }
            if over_ceiling := [r for beside in ran if (r := beside.rate_over_ceiling) is not None]:
                ratios["rate_over_ceiling"] = statistics.median(over_ceiling)
            lines.append({**_line(row, workload, [beside.run for beside in ran]), **ratios})
    return lines


def _line(row: Row, workload: str, runs: list[Measurement]) -> dict[str, Any]:
    def median(name: str) -> float:
        values: list[float] = [getattr(run, name) for run in runs]
        return statistics.median(values)

    rate = median("samples_per_s")
    usd_per_s = sum(USD_PER_HOUR[host] for host in row.hosts) / 3600
    return {
        "name": row.name,
        "workload": workload,
        "samples_per_s": rate,
        "first_batch_s": median("first_batch_s"),
        "cpu_ms_per_sample": median("cpu_ms_per_sample"),
        "stall": median("stall"),
        "delivered_over_ideal": None,
        "usd_per_million_samples": usd_per_s / rate * 1e6,
        "cpu_over_plain": None,
        "daemon_cpu_ms_per_sample": median("daemon_cpu_ms_per_sample"),
        "busy_cores": median("busy_cores"),
        "repeats": [side_by_side.as_dict(run) for run in runs],
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['machine']['cpu_model']}, one core per host; consumer: {result['accelerator']}")
    headings = ["row", "workload", "samples/s", "÷ ideal", "CPU ms/sample", "÷ plain", "(Ray daemons)",
                "first batch s", "stall", "USD/M samples"]  # fmt: skip
    paced = any("rate_over_ceiling" in row for row in result["rows"])
    if paced:
        headings.append("÷ ceiling")
    for heading in headings:
        named = heading in headings[:2]
        table.add_column(heading, justify="left" if named else "right", no_wrap=named)
    workload = None
    for row in result["rows"]:
        if workload not in (None, row["workload"]):
            table.add_section()
        workload = row["workload"]
        table.add_row(
            row["name"],
            workload,
            f"{row['samples_per_s']:,.1f}",
            f"{row['delivered_over_ideal']:.3f}",
            f"{row['cpu_ms_per_sample']:.2f}",
            f"{row['cpu_over_plain']:.2f}",
            f"{row['daemon_cpu_ms_per_sample']:.2f}",
            f"{row['first_batch_s']:.2f}",
            f"{row['stall']:.1%}",
            f"{row['usd_per_million_samples']:.2f}",
            *([f"{row['rate_over_ceiling']:.3f}" if "rate_over_ceiling" in row else ""] if paced else []),
        )
    return table


def _accelerator(alpha: float, beta: float, pace: float | None) -> str:
    if pace is not None:
        return f"paced accelerator at {pace:.0%} of the row's input ceiling"
    if alpha or beta:
        return f"paced accelerator, {alpha:g} s + {beta:g} s per sample"
    return "counts"


if __name__ == "__main__":
    main()
