"""The seconds without steps after a worker dies, after a host dies, in a resize and at the start, and the CPU time of a run's helpers.

    python benchmarks/recovery.py [--beside CHECKOUT] [--repeats N] [--only FIGURE] [--json] [--into benchmarks/results/elastic.json]

Real processes on two emulated hosts (network namespaces of this machine), which share its cores. ``--beside`` measures another checkout
of offload in turn, on the same machine. Each figure is the median over the repeats; all of them are recorded.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import ROOT, machine, versions
from offload.report.run_dir import read_lines
from tests.emulation import Hosts, HostSpec
from tests.emulation.netns import HostProcess
from tests.helpers import RAY_STARTS_NOTHING_AHEAD

JOB = ROOT / "benchmarks" / "jobs" / "recovery.py"
FLOOR = ROOT / "benchmarks" / "jobs" / "resize_floor.py"
HEAD, OTHER = "gpu-1", "cpu-1"
HELPERS = ("ray::Hub", "ray::run hub", "ray::TrainController", "ray::run controller", "ray::SynchronizationActor")
STEPS_BEFORE = 20  # steps of each rank before anything is done to the run
IDLE_S = 20.0
DEADLINE_S = 240.0
LOOK_S = 0.02
MANY = 1000  # epochs: more than a run comes to
FIGURES = {
    "worker": "killed worker → next step",
    "host": "killed host → next step",
    "resize": "resize on standing nodes, without steps",
    "floor": "the least of a resize: actors of plain Ray in the place of others",
    "start": "fit() → first step",
    "helpers": "CPU of the run's helpers, in cores",
}


class _Run:
    """A training on two emulated hosts."""

    def __init__(self, hosts: Hosts, checkout: Path, folder: Path, arguments: list[str], job: Path) -> None:
        self.hosts, self.folder = hosts, folder
        command = [sys.executable, str(job), str(folder), *arguments]
        self.driver: HostProcess = hosts[HEAD].popen(command, env={"PYTHONPATH": str(checkout)})

    def marks(self) -> list[dict[str, Any]]:
        """The steps so far."""
        return read_lines(self.folder / "marks.jsonl") if (self.folder / "marks.jsonl").exists() else []

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait for something true."""
        until = time.monotonic() + DEADLINE_S
        while not (found := what()):
            if time.monotonic() > until or self.driver.poll() is not None:
                raise click.ClickException(f"the run ended, or nothing happened for {DEADLINE_S:.0f} s")
            time.sleep(LOOK_S)
        return found

    def step_of_all(self, ranks: int) -> dict[int, str]:
        """Wait until so many ranks have made several steps; return each one's process, as ``host:pid``."""

        def processes() -> dict[int, str]:
            marks = self.marks()
            of = {rank: [mark["process"] for mark in marks if mark["rank"] == rank] for rank in range(ranks)}
            return {rank: of[rank][-1] for rank in of} if all(len(of[rank]) >= STEPS_BEFORE for rank in of) else {}

        found: dict[int, str] = self.until(processes)
        return found

    def next_step_after(self, at_s: float, before: set[str]) -> float:
        """Wait for the first step of other processes than these; return the seconds from ``at_s`` to it."""

        def step() -> float:
            return next((mark["at_s"] - at_s for mark in self.marks() if mark["process"] not in before), 0.0)

        seconds: float = self.until(step)
        return seconds

    def end(self) -> None:
        (self.folder / "done").touch()
        with contextlib.suppress(Exception):
            self.driver.wait(timeout=DEADLINE_S)


@contextlib.contextmanager
def _run(checkout: Path, *arguments: int | str, job: Path = JOB) -> Iterator[_Run]:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    specs = {name: HostSpec(core=cores, shm_bytes=256 << 20) for name in (HEAD, OTHER)}
    place = ["--resources", json.dumps({"place": 1})]
    with tempfile.TemporaryDirectory(prefix="offload-") as name, Hosts(specs) as hosts:
        hosts.start_ray(
            head=HEAD,
            num_cpus=dict.fromkeys(specs, 2),
            env={"PYTHONPATH": str(checkout), **RAY_STARTS_NOTHING_AHEAD},
            extra_args=dict.fromkeys(specs, place),
        )
        run = _Run(hosts, checkout, Path(name), list(map(str, arguments)), job)
        try:
            yield run
        finally:
            run.end()


def _start_of(run: _Run) -> float:
    """The seconds from fit() to the first step."""
    first: dict[str, Any] = run.until(run.marks)[0]
    return float(first["at_s"]) - float((run.folder / "fit").read_text())


def measure_worker(checkout: Path) -> dict[str, float]:
    with _run(checkout, 1, 2, MANY, "0=2") as run:
        start_s = _start_of(run)
        processes = run.step_of_all(2)
        host, _, pid = processes[1].partition(":")
        at_s = time.monotonic()
        run.hosts[host].run(["kill", "-9", pid], timeout=DEADLINE_S)
        return {"start": start_s, "worker": run.next_step_after(at_s, set(processes.values()))}


def measure_host(checkout: Path) -> dict[str, float]:
    with _run(checkout, 1, 2, MANY, "0=2") as run:
        start_s = _start_of(run)
        processes = run.step_of_all(2)
        at_s = time.monotonic()
        run.hosts[OTHER].kill()
        return {"start": start_s, "host": run.next_step_after(at_s, set(processes.values()))}


def measure_resize(checkout: Path) -> dict[str, float]:
    with _run(checkout, 1, 2, 8, "0=1", "3=2") as run:
        start_s = _start_of(run)
        run.driver.wait(timeout=DEADLINE_S)
        events = read_lines(run.folder / "run" / "events.jsonl")
        costs = [event["without_steps_s"] for event in events if event["event"] == "resize_cost"]
        return {"start": start_s, "resize": float(costs[0])}


def measure_floor(checkout: Path) -> dict[str, float]:
    if checkout != ROOT:  # it does not depend on the checkout
        return {}
    with _run(checkout, job=FLOOR) as run:
        run.driver.wait(timeout=DEADLINE_S)
        return {"floor": float((run.folder / "floor").read_text())}


def measure_helpers(checkout: Path) -> dict[str, float]:
    with _run(checkout, 1, 2, MANY, "0=2") as run:
        start_s = _start_of(run)
        run.step_of_all(2)
        processes = [psutil.Process(pid) for pid in run.hosts[HEAD].pids()]
        helpers = [process for process in processes if _title(process).startswith(HELPERS)]
        before, at_s = _cpu_s(helpers), time.monotonic()
        time.sleep(IDLE_S)
        return {"start": start_s, "helpers": (_cpu_s(helpers) - before) / (time.monotonic() - at_s)}


MEASURES = {
    "worker": measure_worker, "host": measure_host, "resize": measure_resize, "floor": measure_floor,
    "helpers": measure_helpers,
}  # fmt: skip


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@click.command(help=__doc__)
@click.option("--beside", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another checkout.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--only", multiple=True, type=click.Choice(list(MEASURES)), help="Measure these figures alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="Add the result to this JSON file: 'recovery', or with --only 'recovery_of_…'.",
)
def main(beside: Path | None, repeats: int, only: tuple[str, ...], as_json: bool, into: Path | None) -> None:
    console = Console(stderr=True)
    checkouts = {"offload": ROOT, **({"before": beside.resolve()} if beside is not None else {})}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for number in range(repeats):
        for figure in only or MEASURES:
            for name, checkout in checkouts.items():
                for key, value in MEASURES[figure](checkout).items():
                    seconds[name].setdefault(key, []).append(round(value, 3))
                    console.print(f"{number + 1}/{repeats} {name}, {FIGURES[key]}: {value:.3f}")
    document = {
        "what": FIGURES,
        "medians": {name: {key: statistics.median(of) for key, of in each.items()} for name, each in seconds.items()},
        "each": seconds,
        "repeats": repeats,
        "emulation": "two hosts are network namespaces of one machine and share its cores",
        "machine": machine(),
        "versions": versions(),
        "command": f"python {' '.join(part for part in sys.argv if part != str(beside))}",
    }
    if into is not None:
        whole = json.loads(into.read_text()) if into.exists() else {}
        key = "_of_".join(["recovery", *(["_".join(only)] if only else [])])
        into.write_text(json.dumps({**whole, key: document}, indent=1) + "\n")
    if as_json:
        print(json.dumps(document))
    else:
        table = Table("figure", *checkouts)
        for key in FIGURES:
            if key in seconds["offload"]:
                values = [seconds[name].get(key) for name in checkouts]
                table.add_row(FIGURES[key], *(f"{statistics.median(of):.3f}" if of else "" for of in values))
        Console().print(table)


if __name__ == "__main__":
    main()
