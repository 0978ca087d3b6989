"""A GPU host with few cores, alone and with a CPU host beside it: a DataLoader, offload, and what a probe predicts for both.

    python benchmarks/offload_vs_single_gpu.py --cores 4 -o benchmarks/results/offload_vs_single-gpu.json

Emulated hosts share one machine with a GPU. The GPU host is pinned to --cores cores, the CPU host to all others. A probe runs on the GPU
host alone, before any run on both. Each figure is one run's steady state, by the wall clock. NVIDIA's driver tells the GPU's utilisation.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import reference, side_by_side
from benchmarks.rows import protocol
from benchmarks.side_by_side import CPU_HOST, GPU_HOST
from benchmarks.workloads import jpeg_files
from offload.cli.doctor import torch_facts
from tests.emulation import Hosts, HostsError, HostSpec, unavailable

CASES = {"jpeg": "resnet50", "blur": "vit_base_patch16_224"}
CPU_MODEL = "resnet10t"
IMAGES = 600
SHM_BYTES = 16 << 30
ROW_S = 180.0  # for one row, starts included


@click.command(help=__doc__)
@click.option("--workload", "workloads", multiple=True, type=click.Choice(list(CASES)), help="[default: all]")
@click.option("--cores", default=4, show_default=True, type=click.IntRange(min=1), help="Cores of the GPU host.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the JPEG files; missing files are made there.")
@click.option(
    "--cpu", is_flag=True, help="Train a tiny model on the CPU, to see that it runs. It yields no GPU figures."
)
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(workloads: tuple[str, ...], cores: int, data: Path | None, cpu: bool, output: Path | None) -> None:
    if (reason := unavailable()) is not None:
        raise click.ClickException(reason)
    gpus = torch_facts().gpus
    if not (gpus or cpu):
        raise click.ClickException(
            "torch finds no GPU: run this on a machine with one, or pass --cpu to see that it runs."
        )
    available = sorted(os.sched_getaffinity(0))
    if cores >= len(available):
        raise click.ClickException(
            f"--cores {cores} leaves no core for the CPU host: this machine has {len(available)}. Pass fewer."
        )
    log = Console(stderr=True)
    own = {GPU_HOST: tuple(available[:cores]), CPU_HOST: tuple(available[cores:])}
    result: dict[str, Any] = {
        "benchmark": "offload_vs_single_gpu",
        "command": shlex.join(["python", "benchmarks/offload_vs_single_gpu.py", *sys.argv[1:]]),
        "machine": side_by_side.hardware() | {"cores_used": {name: len(those) for name, those in own.items()}},
        "versions": side_by_side.versions(),
        "gpus": [] if cpu else list(gpus),
        "cases": [],
        "failed": [],
    }
    began = time.monotonic()
    for workload in workloads or tuple(CASES):
        case: dict[str, Any] = {"workload": workload, "model": CPU_MODEL if cpu else CASES[workload], "rows": {}}
        result["cases"].append(case)
        arguments = [f"--model={case['model']}", f"--workload={workload}", *(["--cpu"] if cpu else [])]
        if workload == "jpeg":
            arguments += [f"--data={jpeg_files(data or reference.folder_of(workload), images=IMAGES)}"]
        try:
            for name, row in _rows(own, arguments, gpu=not cpu):
                case["rows"][name] = row
                log.print(f"{time.monotonic() - began:4.0f} s  {workload} {name}: {_said(row)}", markup=False)
                _write(output, result)
        except (HostsError, subprocess.TimeoutExpired) as error:
            result["failed"].append({"workload": workload, "reason": str(error)})
            log.print(f"{workload}: {error}", style="red", markup=False)
        compare(case["rows"])
        _write(output, result)
    Console(width=None if sys.stdout.isatty() else 130).print(table(result))
    sys.exit(int(bool(result["failed"])))


def _rows(
    own: Mapping[str, tuple[int, ...]], arguments: Sequence[str], *, gpu: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's name and figures, in hosts of these cores. The CPU host joins for the last row alone."""
    cores = [f"--cores={len(own[GPU_HOST])}", f"--cpu-host-cores={len(own[CPU_HOST])}"]
    with Hosts({name: HostSpec(core=those, shm_bytes=SHM_BYTES) for name, those in own.items()}) as hosts:

        def row(kind: str) -> dict[str, Any]:
            return _row(hosts, [kind, *arguments, *cores])

        yield "device", row("device")
        yield "dataloader, GPU host", row("dataloader")
        # A worker on a GPU reserves no core. One on the CPU does, and gets one that the host does not have.
        num_cpus, num_gpus = ({}, {GPU_HOST: 1}) if gpu else ({GPU_HOST: len(own[GPU_HOST]) + 1}, {})
        hosts.start_ray(head=GPU_HOST, workers=[], num_cpus=num_cpus, num_gpus=num_gpus, env=_environment())
        yield "predicted", row("predicted")
        yield "offload, GPU host", row("offload")
        hosts.join_ray(CPU_HOST, env=_environment())
        yield "offload, both hosts", row("offload")


def _environment() -> dict[str, str]:
    """One thread per process, as everywhere in these benchmarks; what the user put on Python's path stays there."""
    path = os.pathsep.join(filter(None, [str(side_by_side.ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**side_by_side.ENVIRONMENT, "PYTHONPATH": path}


def _row(hosts: Hosts, arguments: Sequence[str]) -> dict[str, Any]:
    done = hosts[GPU_HOST].run(
        [sys.executable, "-m", "benchmarks.rows.on_gpu", *arguments],
        timeout=ROW_S, env=_environment(), cwd=side_by_side.ROOT, check=True,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(protocol.ANSWER)]
    found: dict[str, Any] = json.loads(line.removeprefix(protocol.ANSWER))
    return found


def _said(row: dict[str, Any]) -> str:
    text = f"{row['samples_per_s']:,.1f} samples/s"
    if row.get("utilization") is not None:
        text += f", utilisation {row['utilization']:.0%}"
    if "samples_per_s_with_cpu_host" in row:
        text += f", with the CPU host {row['samples_per_s_with_cpu_host']:,.1f}"
    return text


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Add each run's rate over that of the DataLoader and of the device, and the prediction's error."""
    device, loader, predicted = (rows.get(name) for name in ("device", "dataloader, GPU host", "predicted"))
    for name, forecast in (
        ("offload, GPU host", "samples_per_s"),
        ("offload, both hosts", "samples_per_s_with_cpu_host"),
    ):
        if (run := rows.get(name)) is None or device is None or loader is None or predicted is None:
            continue
        run["over_dataloader"] = run["samples_per_s"] / loader["samples_per_s"]
        run["over_device"] = run["samples_per_s"] / device["samples_per_s"]
        run["predicted_samples_per_s"] = predicted[forecast]
        run["prediction_error"] = predicted[forecast] / run["samples_per_s"] - 1


def _write(output: Path | None, result: dict[str, Any]) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def table(result: dict[str, Any]) -> Table:
    """The rows of all cases."""
    cores = result["machine"]["cores_used"]
    title = f"{', '.join(result['gpus']) or 'CPU'}; GPU host {cores[GPU_HOST]} cores, CPU host {cores[CPU_HOST]} cores"
    shown = Table(title=title)
    for heading in (
        "model",
        "samples",
        "row",
        "samples/s",
        "÷ DataLoader",
        "÷ device",
        "utilisation",
        "stall",
        "predicted",
    ):
        shown.add_column(heading, justify="left" if heading in ("model", "samples", "row") else "right")
    for case in result["cases"]:
        shown.add_section()
        for name, row in case["rows"].items():
            if name == "predicted":
                continue
            error = row.get("prediction_error")
            shown.add_row(
                case["model"],
                case["workload"],
                name,
                f"{row['samples_per_s']:,.1f}",
                *(f"{row[key]:.2f}" if key in row else "" for key in ("over_dataloader", "over_device")),
                *(f"{row[key]:.0%}" if row.get(key) is not None else "" for key in ("utilization", "stall")),
                "" if error is None else f"{row['predicted_samples_per_s']:,.1f} ({error:+.0%})",
            )
    return shown


if __name__ == "__main__":
    main()
