"""What a run costs before and beside its training: seconds and CPU seconds of a tiny run on a Ray of this machine alone.

    python benchmarks/startup.py [--repeats 3] [-o benchmarks/results/startup.json]

A process on an emulated host starts Ray and trains on 203 samples four times. The first run is cold: the host's preload server imports
torch. The others are warm. Every repeat runs beside one with ``OFFLOAD_PRELOAD=0``, where each process imports what it needs. The
claim: processes that are forked with their imports done start a run in a fraction of the CPU time.

In turns with them, the same small training runs as three whole scripts: with offload, with a torch DataLoader, and with Ray Train's
TorchTrainer, each on both cores (benchmarks/jobs/start_and_end.py). For each it prints the seconds and the CPU seconds from the script's
start and from ``fit()`` to the end of the first step, from the last step to the return of ``fit()``, and from there to the end of the
process. Ray's start and shutdown lie within ``fit()``.
"""

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.jobs.start_and_end import KINDS
from offload.preload import SWITCH
from tests.emulation import Hosts, HostSpec

RUNS = 4


def measured(preload: bool) -> Iterator[dict[str, Any]]:
    """The parts of one process: the start of Ray, the cold run, and the warm ones, with the seconds and CPU seconds of each."""
    spec = HostSpec(core=side_by_side.cores(), shm_bytes=side_by_side.SHM_BYTES)
    environment = {**side_by_side.ENVIRONMENT, SWITCH: str(int(preload))}
    with Hosts({"alone": spec}) as hosts:
        host = hosts["alone"]
        before = host.cpu_seconds().total_s
        process = host.popen(
            [sys.executable, "-m", "benchmarks.jobs.tiny_runs", str(RUNS)],
            env=environment, cwd=side_by_side.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            spent = host.cpu_seconds().total_s
            yield {**json.loads(line), "cpu_s": spent - before}
            before = spent
            process.stdin.write("\n")
            process.stdin.flush()
        if process.wait(60) != 0:
            raise side_by_side.RowFailed(f"the runs ended with {process.returncode}")


SPANS = {
    "script to first step": ("script", "first step"),
    "fit() to first step": ("fit", "first step"),
    "last step to return": ("last step", "returned"),
    "return to exit": ("returned", "exit"),
}
LOOK_S = 0.01


def spans(kind: str) -> dict[str, dict[str, float]]:
    """The seconds and CPU seconds between the moments of a script, by span. CPU seconds are those of all the host's processes."""
    spec = HostSpec(core=side_by_side.cores(), shm_bytes=side_by_side.SHM_BYTES)
    with Hosts({"alone": spec}) as hosts:
        host = hosts["alone"]
        path = hosts.folder / "marks"
        path.touch()
        seen = {"script": (time.monotonic(), host.cpu_seconds().total_s)}
        process = host.popen(
            [sys.executable, "-m", "benchmarks.jobs.start_and_end", kind, str(path)],
            env=side_by_side.ENVIRONMENT, cwd=side_by_side.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ended = False
        while not ended:
            ended = process.poll() is not None
            for line in path.read_text().splitlines()[len(seen) - 1 :]:
                mark = json.loads(line)
                seen[mark["what"]] = (mark["at_s"], host.cpu_seconds().total_s)
            time.sleep(LOOK_S)
        seen["exit"] = (time.monotonic(), host.cpu_seconds().total_s)
        if process.returncode != 0:
            raise side_by_side.RowFailed(f"the script with {kind} ended with {process.returncode}")
    return {
        name: {"seconds": seen[until][0] - seen[since][0], "cpu_s": seen[until][1] - seen[since][1]}
        for name, (since, until) in SPANS.items()
    }


def medians_of_spans(scripts: dict[str, list[dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The medians over the repeats, by script and span."""
    return {
        kind: {
            span: {name: statistics.median(each[span][name] for each in runs) for name in ("seconds", "cpu_s")}
            for span in SPANS
        }
        for kind, runs in scripts.items()
    }


def medians(parts: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians over the repeats: of the start with the process's imports, of the cold run, and of all warm runs."""
    kinds = {
        "start": [each[0] for each in parts],
        "cold_run": [each[1] for each in parts],
        "warm_run": [run for each in parts for run in each[2:]],
    }
    return {
        kind: {name: statistics.median(run[name] for run in runs) for name in ("seconds", "cpu_s")}
        for kind, runs in kinds.items()
    }


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
@click.option("--scripts-only", is_flag=True, help="Only compare the three scripts.")
def main(repeats: int, output: Path | None, scripts_only: bool) -> None:
    seen: dict[str, list[list[dict[str, Any]]]] = {"forked": [], "imported": []}
    scripts: dict[str, list[dict[str, dict[str, float]]]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, runs in scripts.items():
            runs.append(spans(kind))
        if scripts_only:
            continue
        seen["forked"].append(list(measured(preload=True)))
        seen["imported"].append(list(measured(preload=False)))
    found = {name: medians(parts) for name, parts in seen.items() if parts}
    compared = medians_of_spans(scripts)
    document = {
        "benchmark": "startup",
        "claim": "processes that are forked with their imports done start a run in a fraction of the CPU time",
        "command": shlex.join(["python", "benchmarks/startup.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
        "medians": found,
        "cpu_forked_over_imported": {
            kind: forked["cpu_s"] / found["imported"][kind]["cpu_s"] for kind, forked in found.get("forked", {}).items()
        },
        "scripts": compared,
        "repeats": {**seen, "scripts": scripts},
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    for name, kinds in found.items():
        said = "   ".join(f"{kind} {each['seconds']:.1f} s, {each['cpu_s']:.1f} CPU-s" for kind, each in kinds.items())
        print(f"{name:9} {said}")
    for name, parts in compared.items():
        said = "   ".join(f"{span} {each['seconds']:.1f} s, {each['cpu_s']:.1f} CPU-s" for span, each in parts.items())
        print(f"{name:11} {said}")


if __name__ == "__main__":
    main()
