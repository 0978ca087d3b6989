"""What a run leaves on a Ray cluster that goes on: the seconds until its CPUs are free, and until nothing of it is there.

    python benchmarks/leaving.py [--repeats 2] [-o benchmarks/results/leaving.json]

A Ray of this machine stays up. On it, a small training is paused, stopped, or loses its program: the driver by kill -9, or an actor that
trains by ``ray.kill`` or kill -9. "CPUs" is the time until the cluster has all of its CPUs again, and "nothing" until no placement group,
no named actor and no process of the run is left. The server that forks a node's processes serves all runs, and does not count.
"""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
import ray
from ray.util.placement_group import placement_group_table
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import endings, side_by_side
from offload import runs

CPUS = 4
PATIENCE_S = 120.0
LOOK_S = 0.1
RUN = """
import os, sys
sys.path.insert(0, {folder!r})
import training
training.build().fit(run_dir={run!r}, address={address!r}, quiet=True)
"""


@ray.remote(num_cpus=0)
class Host:
    """A program's actor that trains."""

    def process(self) -> int:
        return os.getpid()

    def train(self, script: str) -> None:
        exec(script, {})


def driver(script: str, mark: str, act: Callable[[], object] | None) -> float:
    """Train in a program of its own; once it trains, act, or kill it."""
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, endings.MARK: mark}, stdout=subprocess.DEVNULL
    ) as program:
        until(trains)
        began = time.monotonic()
        (act or program.kill)()
        return began


def actor(script: str, mark: str, by_ray: bool) -> float:
    """Train in an actor; once it trains, kill it."""
    host: Any = Host.options(runtime_env={"env_vars": {endings.MARK: mark}}).remote()  # type: ignore[attr-defined]
    pid = ray.get(host.process.remote())
    host.train.remote(script)
    until(trains)
    began = time.monotonic()
    if by_ray:
        ray.kill(host)
    else:
        os.kill(pid, signal.SIGKILL)
    return began


WAYS: dict[str, Callable[[str, str], float]] = {
    "stop": lambda script, mark: driver(script, mark, lambda: runs.stop("run")),
    "driver, kill -9": lambda script, mark: driver(script, mark, None),
    "actor, ray.kill": lambda script, mark: actor(script, mark, by_ray=True),
    "actor, kill -9": lambda script, mark: actor(script, mark, by_ray=False),
}


def trains() -> bool:
    return any(run.state == "training" for run in runs.listed())


def all_cpus() -> bool:
    available: Any = ray.available_resources()  # type: ignore[no-untyped-call]
    return bool(available.get("CPU") == CPUS)


def nothing_of(mark: str) -> bool:
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return not groups and not runs.listed() and not any(map(counts, endings.of_run(mark)))


def counts(process: psutil.Process) -> bool:
    try:
        return not any("preload" in word for word in process.cmdline())
    except psutil.Error:
        return False


def until(holds: Callable[[], bool]) -> float:
    """Wait; return the time. Raises TimeoutError after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(holds)
        time.sleep(LOOK_S)
    return time.monotonic()


@click.command(help=__doc__)
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, as_json: bool, output: Path | None) -> None:
    seconds: dict[str, dict[str, list[float]]] = {way: {"cpus_s": [], "nothing_s": []} for way in WAYS}
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    context: Any = ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    address = context.address_info["gcs_address"]
    for _ in range(repeats):
        for way, measure in WAYS.items():
            with tempfile.TemporaryDirectory(prefix="leaving-") as folder:
                Path(folder, "training.py").write_text(endings.SCRIPT)
                script = RUN.format(folder=folder, run=str(Path(folder, "run")), address=address)
                mark = uuid.uuid4().hex
                began = measure(script, mark)
                seconds[way]["cpus_s"].append(round(until(all_cpus) - began, 2))
                seconds[way]["nothing_s"].append(round(until(partial(nothing_of, mark)) - began, 2))
    ray.shutdown()
    document = {
        "benchmark": "leaving",
        "claim": "a run leaves nothing on a cluster that goes on, 10 s after any end",
        "seconds": seconds,
        "command": shlex.join(["python", "benchmarks/leaving.py", *sys.argv[1:]]),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document))
        return
    table = Table("end", "CPUs free, s", "nothing left, s", title="What a run leaves on a Ray cluster")
    for way, measured in seconds.items():
        table.add_row(way, *(f"{statistics.median(values):.1f}" for values in measured.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
