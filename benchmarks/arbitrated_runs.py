"""Two real runs that share two emulated hosts by the arbiter, beside one after the other and a static split.

    python benchmarks/arbitrated_runs.py [--row ROW ...] [--repeats 2] [-o benchmarks/results/arbitrated_runs.json]

All processes are real, and the hosts are network namespaces of this machine. What would need more of it is paced: preprocessing sleeps for
its time of a core, and an accelerator for the time of its step. So 12 cores and 6 accelerators fit on two cores of the machine. One run is
bound by its input, the other by its accelerators. Each trains one epoch, and each sample must be trained once.

Rows:

\b
  after       both runs, one after the other, each with the whole cluster
  split       both at once, each with a host of its own: half of the accelerators and half of the cores
  arbiter     both at once on the whole cluster, which the arbiter shares
  killed      the same, and the process of the arbiter is killed in the middle
  priority    a run of higher priority comes while another one holds everything: the seconds until it has its least worker, and until
              its first step, beside the seconds of the other's checkpoint and change of workers
  weights     two equal runs with weights 2 and 1: the samples/s of both

"ideal" is what the best division of the cluster would take, without starts, restarts and measurements. Rows that the output has
are not measured again; a row takes three to eight minutes.
"""

import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.cluster_sharing import Results
from benchmarks.jobs.arbitrated_run import WORKER_CPUS, Settings
from benchmarks.side_by_side import ROOT
from offload.report.run_dir import read_lines
from tests.emulation import Hosts, HostSpec
from tests.emulation.history import each_pass, read_history
from tests.emulation.netns import HostProcess
from tests.helpers import RAY_STARTS_NOTHING_AHEAD

JOB = ROOT / "benchmarks" / "jobs" / "arbitrated_run.py"
HOSTS = ("host-1", "host-2")
CORES, ACCELERATORS = 6, 3  # of each host
# Ray lets its processes wait behind all others of the machine, which on shared cores would slow the starts of runs.
ENV = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", **RAY_STARTS_NOTHING_AHEAD}
DEADLINE_S = 900.0
LOOK_S = 0.1
KILL_AT_S = 45.0  # after both were submitted
STEPS_S = 10.0  # without a step: a run is about to change
SETTLED_S = 40.0  # that the rate of runs with weights is measured, once neither changes

INPUT = Settings(
    name="input-bound", samples=8000, batch_size=20, core_s=0.25, alpha_s=0.02, beta_s=0.004, workers=(1, 6)
)
DEVICE = Settings(
    name="device-bound", samples=22_800, batch_size=60, core_s=0.015, alpha_s=0.02, beta_s=0.05, workers=(3, 6)
)
BOTH = (INPUT, DEVICE)
LONG = 100_000  # samples: more than a run comes to


class Failed(click.ClickException):
    """A run that did not do as it should."""


class Run:
    """A run on an emulated host, under way from the start of its program."""

    def __init__(self, hosts: Hosts, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder / settings.name
        self.folder.mkdir()
        self.began = time.time()
        self._errors = (self.folder / "errors").open("w")
        head = next(iter(hosts))
        self.driver: HostProcess = hosts[head].popen(
            [sys.executable, str(JOB), str(self.folder), json.dumps(asdict(settings))],
            env=ENV,
            stdout=self._errors,
            stderr=self._errors,
        )

    def wait(self) -> float:
        """Wait for its end; return the time. Raises Failed unless it has trained each sample once."""
        self.driver.wait(timeout=DEADLINE_S)
        ended = time.time()
        self._errors.close()
        if self.driver.returncode:
            raise Failed(f"run {self.settings.name} failed: {(self.folder / 'errors').read_text()[-3000:]}")
        counts = each_pass(read_history(self.folder / "log"))
        trained = counts.get(0, Counter())
        if set(counts) != {0} or len(trained) != self.settings.samples or set(trained.values()) != {1}:
            raise Failed(f"run {self.settings.name} trained {len(trained)} samples, some of them more than once")
        return ended

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self.driver.send_signal(signal.SIGINT)
        self.driver.wait(timeout=DEADLINE_S)
        self._errors.close()

    def marks(self) -> list[dict[str, Any]]:
        """Its batches so far."""
        return _lines(self.folder / "marks.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its events of this kind so far."""
        return [e for e in _lines(self.folder / self.settings.name / "events.jsonl") if e["event"] == kind]

    def rate(self, since: float, until: float) -> float:
        """Samples/s between two moments."""
        samples = sum(float(mark["samples"]) for mark in self.marks() if since < mark["at"] <= until)
        return samples / (until - since)

    @property
    def workers(self) -> int:
        """The workers that train at present; 0 before the first batch."""
        marks = self.marks()
        return int(marks[-1]["workers"]) if marks else 0

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait for something true."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := holds()):
            if self.driver.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"run {self.settings.name} ended early: {(self.folder / 'errors').read_text()[-3000:]}")
            time.sleep(LOOK_S)
        return value

    def story(self) -> list[dict[str, Any]]:
        """Its leases and changes of workers, in seconds since its start."""
        kinds = ("first_step", "leased", "resized", "resize_cost")
        events = [event for kind in kinds for event in self.events(kind)]
        return [{**event, "at": round(event["at"] - self.began, 1)} for event in sorted(events, key=lambda e: e["at"])]


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.exists() else []


@contextlib.contextmanager
def cluster(names: Sequence[str] = HOSTS) -> Iterator[tuple[Hosts, Path]]:
    """Emulated hosts with one Ray on them, and a folder for their runs."""
    specs = {name: HostSpec(shm_bytes=512 << 20) for name in names}
    with tempfile.TemporaryDirectory(prefix="arbitrated-") as folder, Hosts(specs) as hosts:
        hosts.start_ray(
            head=names[0],
            num_cpus=dict.fromkeys(names, CORES),
            num_gpus=dict.fromkeys(names, ACCELERATORS),
            env=ENV,
            deadline_s=DEADLINE_S,
        )
        yield hosts, Path(folder)


@contextlib.contextmanager
def arbitrated() -> Iterator[tuple[Hosts, Path]]:
    """The cluster with an arbiter."""
    with cluster() as (hosts, folder):
        hosts[HOSTS[0]].run(
            [sys.executable, "-m", "offload", "arbiter", "start"], env=ENV, timeout=DEADLINE_S, check=True
        )
        yield hosts, folder


def after() -> dict[str, Any]:
    """Each run alone on the whole cluster, with the workers that suit it best."""
    seconds = []
    with cluster() as (hosts, folder):
        for settings in (replace(INPUT, workers=(1, 1)), replace(DEVICE, workers=(6, 6))):
            run = Run(hosts, settings, folder)
            seconds.append(run.wait() - run.began)
    return {"seconds": sum(seconds), "of_each_s": seconds}


def split() -> dict[str, Any]:
    """Each run alone on a host."""
    with cluster(HOSTS[:1]) as (one, folder), cluster(HOSTS[1:]) as (other, beside):
        runs = [
            Run(one, replace(INPUT, workers=(1, 1)), folder),
            Run(other, replace(DEVICE, workers=(3, 3)), beside),
        ]
        ended = _ended(runs)
    seconds = [end - run.began for end, run in zip(ended, runs, strict=True)]
    return {"seconds": max(ended) - min(run.began for run in runs), "of_each_s": seconds}


def shared(kill_at_s: float | None = None) -> dict[str, Any]:
    """Both runs under the arbiter."""
    with arbitrated() as (hosts, folder):
        runs = [Run(hosts, replace(settings, arbiter=True), folder) for settings in BOTH]
        if kill_at_s is not None:
            time.sleep(kill_at_s)
            os.kill(_arbiter(hosts).pid, signal.SIGKILL)
        ended = _ended(runs)
        story = {run.settings.name: run.story() for run in runs}
    seconds = [end - run.began for end, run in zip(ended, runs, strict=True)]
    return {"seconds": max(ended) - min(run.began for run in runs), "of_each_s": seconds, "story": story}


def killed() -> dict[str, Any]:
    """Both runs under an arbiter whose process dies."""
    return shared(KILL_AT_S)


def priority() -> dict[str, Any]:
    """An urgent run beside one that holds everything."""
    with arbitrated() as (hosts, folder):
        low = Run(hosts, replace(DEVICE, name="low", samples=LONG, arbiter=True), folder)
        low.until(lambda: low.workers == 2 * ACCELERATORS)
        urgent = Run(hosts, replace(INPUT, name="urgent", samples=LONG, arbiter=True, priority=1), folder)
        urgent.until(lambda: urgent.workers)
        cost = low.until(lambda: [event for event in low.events("resize_cost") if event["at"] > urgent.began])[-1]
        arrived = _arrival(hosts, "urgent")
        least = min(event["at"] for event in urgent.events("leased"))
        withdrawn = min(event["at"] for event in low.events("leased") if event["at"] > arrived)
        first_step = min(mark["at"] for mark in urgent.marks())
        commits = [event for event in low.events("checkpoint") if arrived < event["at"] <= least]
        story = {run.settings.name: run.story() for run in (low, urgent)}
        for run in (urgent, low):
            run.stop()
    return {
        "start_of_program_s": arrived - urgent.began,
        "others_lose_it_after_s": withdrawn - arrived,
        "least_workers_after_s": least - arrived,
        "first_step_after_s": first_step - arrived,
        "commits_meanwhile": len(commits),
        "of_them_at_an_interval": sum(event["reason"] == "interval" for event in commits),
        "commit_s": sum(event["seconds"] for event in commits),
        "resize_of_the_other_s": cost["without_steps_s"],
        "interval_of_commits_s": low.settings.every_s,
        "story": story,
    }


def weights() -> dict[str, Any]:
    """Equal runs, of which one has twice the weight."""
    with arbitrated() as (hosts, folder):
        heavy, light = (
            Run(hosts, replace(DEVICE, name=name, samples=LONG, workers=(2, 6), arbiter=True, weight=weight), folder)
            for name, weight in (("weight-2", 2.0), ("weight-1", 1.0))
        )
        heavy.until(lambda: heavy.workers and light.workers)

        def quiet() -> bool:
            """Both train with what they may have, and have done so for long enough."""
            runs, now = (heavy, light), time.time()
            as_leased = all(run.workers == run.events("leased")[-1]["workers"] for run in runs)
            train = all(now - run.marks()[-1]["at"] < STEPS_S for run in runs)
            return as_leased and train and now - max(at for run in runs for at in _changes(run)) > SETTLED_S + 5

        heavy.until(quiet)
        until = time.time() - 1
        since = until - SETTLED_S
        rates = [run.rate(since, until) for run in (heavy, light)]
        workers = [run.workers for run in (heavy, light)]
        story = {run.settings.name: run.story() for run in (heavy, light)}
        for run in (heavy, light):
            run.stop()
    return {"ratio": rates[0] / rates[1], "samples_per_s": rates, "workers": workers, "story": story}


def _changes(run: Run) -> list[float]:
    """When its workers changed."""
    marks = run.marks()
    return [marks[0]["at"]] + [two["at"] for one, two in itertools.pairwise(marks) if one["workers"] != two["workers"]]


def _ended(runs: Sequence[Run]) -> list[float]:
    """When each of these runs ended."""
    ended: dict[int, float] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < len(runs):
        for number, run in enumerate(runs):
            if number not in ended and run.driver.poll() is not None:
                ended[number] = run.wait()
        if time.monotonic() > deadline:
            raise Failed(f"{len(runs) - len(ended)} runs have not ended within {DEADLINE_S:.0f} s")
        time.sleep(LOOK_S)
    return [ended[number] for number in range(len(runs))]


def _arrival(hosts: Hosts, name: str) -> float:
    """When the arbiter first heard of a run."""
    status = hosts[HOSTS[0]].run(
        [sys.executable, "-m", "offload", "arbiter", "status", "--json"], env=ENV, timeout=DEADLINE_S, check=True
    )
    return next(float(run["since"]) for run in json.loads(status.stdout)["runs"] if run["name"] == name)


def _arbiter(hosts: Hosts) -> psutil.Process:
    """The process of the arbiter."""
    for pid in hosts[HOSTS[0]].pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if "".join(process.cmdline()[:1]).startswith(("ray::arbiter", "ray::RayArbiter")):
                return process
    raise Failed("no process of the arbiter runs on the head node")


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "after": after, "split": split, "arbiter": shared, "killed": killed, "priority": priority, "weights": weights,
}  # fmt: skip


# -- the ideal ---------------------------------------------------------------------------------------------------------


def rate_of(settings: Settings, workers: int, cores: int) -> float:
    """Samples/s of workers and cores, if they never wait but for each other."""
    largest = -(-settings.batch_size // workers)
    return min(settings.batch_size / (settings.alpha_s + settings.beta_s * largest), cores / settings.core_s)


def ideals() -> dict[str, float]:
    """The least seconds of each arrangement, without starts, restarts and measurements."""
    accelerators, cores = len(HOSTS) * ACCELERATORS, len(HOSTS) * CORES

    def alone(settings: Settings, accelerators: int, cores: int, share: float = 1.0) -> float:
        rates = (rate_of(settings, k, int(cores - k * WORKER_CPUS)) for k in range(1, accelerators + 1))
        return share * settings.samples / max(rates)

    one, other = BOTH
    together = []
    for k, rest in itertools.product(range(1, accelerators), repeat=2):
        free = int(cores - (k + rest) * WORKER_CPUS)
        for c in range(1, free if k + rest <= accelerators else 0):
            rates = rate_of(one, k, c), rate_of(other, rest, free - c)
            times = one.samples / rates[0], other.samples / rates[1]
            first = min(times)
            last = one if times[0] > first else other
            # Then the other has everything.
            together.append(first + alone(last, accelerators, cores, 1 - first / max(times)))
    return {
        "after": sum(alone(settings, accelerators, cores) for settings in BOTH),
        "split": max(alone(settings, ACCELERATORS, CORES) for settings in BOTH),
        "arbiter": min(together),
        "killed": min(together),
    }


# -- the command -------------------------------------------------------------------------------------------------------


@click.command(help=__doc__)
@click.option(
    "--row", "rows", multiple=True, type=click.Choice(list(ROWS)), help="Measure this row alone. [repeatable]"
)
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON only.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(rows: tuple[str, ...], repeats: int, as_json: bool, output: Path | None) -> None:
    more = {
        "benchmark": "arbitrated_runs",
        "claim": "under the arbiter, an input-bound and a device-bound run end in 0.8 of the time of the better other arrangement",
        "paced": {settings.name: asdict(settings) for settings in BOTH},
        "hosts": {name: {"cores": CORES, "accelerators": ACCELERATORS} for name in HOSTS},
        "ideal_s": ideals(),
    }
    results = Results(output, ["python", "benchmarks/arbitrated_runs.py", *sys.argv[1:]], more)
    for repeat in range(repeats):
        for row in rows or ROWS:
            key = {"row": row, "repeat": repeat}
            if not results.has(key):
                measured = ROWS[row]()
                results.add(key, measured | {"processes_ready_to_run": round(os.getloadavg()[1], 1)})
    if not as_json:
        for table in tables(results.rows):
            Console().print(table)


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """The medians."""
    ideal = ideals()

    def median(row: str, name: str) -> float | None:
        values = [one[name] for one in rows if one["row"] == row]
        return statistics.median(values) if values else None

    seconds = {row: value for row in ideal if (value := median(row, "seconds")) is not None}
    best = min((seconds[row] for row in ("after", "split") if row in seconds), default=None)
    arrangements = Table(
        "arrangement",
        "both ended, s",
        "ideal, s",
        "÷ the better of the first two",
        title="Two runs, paced, on two emulated hosts",
    )
    for row, value in seconds.items():
        arrangements.add_row(row, f"{value:.0f}", f"{ideal[row]:.0f}", "" if best is None else f"{value / best:.2f}")
    shown = [arrangements] if seconds else []
    names = {
        "priority": (
            "others_lose_it_after_s", "least_workers_after_s", "first_step_after_s", "commits_meanwhile", "commit_s",
            "resize_of_the_other_s",
        ),
        "weights": ("ratio",),
    }  # fmt: skip
    for row, columns in names.items():
        values = [median(row, name) for name in columns]
        if values[0] is not None:
            table = Table(*(name.replace("_", " ") for name in columns), title=row)
            table.add_row(*(f"{value:.2f}" for value in values))
            shown.append(table)
    return shown


if __name__ == "__main__":
    main()
