"""A search of eight trials on two emulated hosts: offload.tune beside Ray Tune with Ray Train and Ray Data.

    python benchmarks/tuning.py [--row ROW ...] [--repeats 2] [-o benchmarks/results/tuning.json]

All processes are real, and the hosts are network namespaces of this machine. Preprocessing and accelerators are paced: preprocessing sleeps
for its time of a core, and an accelerator for the time of its step. So eight cores and two accelerators fit on two cores of the machine.
Both ways train the same net on the same digits with the same eight learning rates, under Tune's own ASHA. A trial has one worker.

Rows:

\b
  plain       Ray's own guide: the trial runs a TorchTrainer, whose data set is decoded by Ray Data. As many trials at a time as there
              are accelerators
  offload     offload.tune with shared= in a folder of each host, under the arbiter, as many trials at a time
  one-folder  the same with a folder that both hosts see and whose locks hold across them, as on some network file systems. Here it is
              a folder of the machine
  apart       the same, but each trial makes its own samples
  population  offload.tune with population-based training: three trials bound by their accelerators, of which there are six. The
              arbiter favors the best trial

"decoded" counts decoded images, over those of one trial that trains to the end. "again in use" is the time from the end of a trial until
other trials hold as many cores, or as many accelerators, as all held before, median and most. Rows that the output has are not measured
again; a row takes two to six minutes.
"""

import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.cluster_sharing import Results
from benchmarks.jobs.tuning_run import Settings
from benchmarks.side_by_side import ROOT
from tests.emulation import Hosts, HostSpec
from tests.helpers import RAY_STARTS_NOTHING_AHEAD

JOB = ROOT / "benchmarks" / "jobs" / "tuning_run.py"
HOSTS = ("host-1", "host-2")
CORES, ACCELERATORS = 4, 1  # of each host
# Ray lets its processes wait behind all others of the machine, which on shared cores would slow the starts of trials.
ENV = {
    "PYTHONPATH": str(ROOT),
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    **RAY_STARTS_NOTHING_AHEAD,
}
DEADLINE_S = 900.0
SHARED = "ssd:/dev/shm/shared:200MB"  # a file system of each host's own
RATES = (0.01, 1.0, 0.003, 0.3, 0.03, 3.0, 0.1, 0.001)

ASHA = Settings(
    way="offload", shared=SHARED, rates=RATES, epochs=4, samples=256, batch_size=16, core_s=0.12, alpha_s=0.02,
    beta_s=0.002, concurrent=len(HOSTS) * ACCELERATORS,
)  # fmt: skip

POPULATION = Settings(
    way="offload", shared=SHARED, rates=(0.003, 0.1, 0.01), epochs=12, samples=1344, batch_size=48, core_s=0.02, alpha_s=0.02,
    beta_s=0.02, workers=(1, 4), concurrent=3, every=3, favor=8.0,
)  # fmt: skip


class Failed(click.ClickException):
    """A search that did not end as it should."""


@contextlib.contextmanager
def cluster(accelerators: int) -> Iterator[tuple[Hosts, Path]]:
    """Emulated hosts with one Ray on them, and a folder that both see."""
    specs = {name: HostSpec(shm_bytes=1 << 30) for name in HOSTS}
    with tempfile.TemporaryDirectory(prefix="tuning-") as folder, Hosts(specs) as hosts:
        hosts.start_ray(
            head=HOSTS[0],
            num_cpus=dict.fromkeys(HOSTS, CORES),
            num_gpus=dict.fromkeys(HOSTS, accelerators),
            object_store_memory=400 << 20,
            env=ENV,
            # Without it, Ray Train never frees the accelerators of a trial that Tune stops: it asks the state API who is alive.
            dashboard=True,
            deadline_s=DEADLINE_S,
        )
        yield hosts, Path(folder)


def searched(settings: Settings, accelerators: int = ACCELERATORS) -> dict[str, Any]:
    """Run one search, and return what came out of it."""
    with cluster(accelerators) as (hosts, folder):
        if settings.shared is not None:
            settings = replace(settings, shared=settings.shared.replace("FOLDER", str(folder)))
        head = hosts[HOSTS[0]]
        if settings.way == "offload":
            command = [sys.executable, "-m", "offload", "arbiter", "start"]
            head.run(command, env=ENV, timeout=DEADLINE_S, check=True)
        with (folder / "errors").open("w") as errors:
            program = head.popen(
                [sys.executable, str(JOB), str(folder), json.dumps(asdict(settings))],
                env=ENV,
                stdout=errors,
                stderr=errors,
            )
            program.wait(timeout=DEADLINE_S)
        if program.returncode:
            raise Failed(f"the search failed: {(folder / 'errors').read_text()[-4000:]}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
        events = [json.loads(line) for line in (folder / "heard.jsonl").read_text("utf-8").splitlines()]
        decoded = (folder / "decoded").stat().st_size
    return measured(result, events, decoded, settings)


def measured(
    result: Mapping[str, Any], events: Sequence[Mapping[str, Any]], decoded: int, settings: Settings
) -> dict[str, Any]:
    """A row from what a search has left."""
    began = result["began"]
    lanes = [
        {**lane, "since": lane["since"] - began, "until": None if lane["until"] is None else lane["until"] - began}
        for lane in result["lanes"]
    ]
    events = [{**event, "at": round(event["at"] - began, 2)} for event in events]
    firsts = {event["rate"]: event["at"] for event in reversed(events) if event["event"] == "trains"}
    return {
        "seconds": result["seconds"],
        "first_batch_s": min(firsts.values()),
        "best_rate": result["best_rate"],
        "best_accuracy": result["best_accuracy"],
        "epochs": sum(trial["epochs"] for trial in result["trials"]),
        "decoded": decoded,
        "decoded_over_one_trial": decoded / (settings.samples * settings.epochs),
        "again_in_use": again_in_use(events, lanes),
        "trials": result["trials"],
        "events": events,
        "lanes": lanes,
    }


# -- what a trial leaves ----------------------------------------------------------------------------------------------


def again_in_use(events: Sequence[Mapping[str, Any]], lanes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each end of a trial after which others train on: the seconds until other trials hold as much as all held at that moment.

    Cores may be less by one, since a new worker takes a part of one. ``None`` if that never happens: for accelerators, because no trial
    waits for one.
    """
    runs = {lane["run"] for lane in lanes}
    rows = []
    for event in events:
        if event["event"] != "ended" or (trial := event["trial"]) not in runs:
            continue
        at = event["at"]
        moments = sorted({lane["since"] for lane in lanes if lane["since"] > at})
        before = {what: sum(held(lanes, run, what, at) for run in runs) for what in ("workers", "cores")}

        def again(what: str, least: float, at: float = at, trial: str = trial, moments: list[float] = moments) -> Any:
            others = runs - {trial}
            reached = (m for m in moments if sum(held(lanes, run, what, m) for run in others) >= least)
            return next((moment - at for moment in reached), None)

        rows.append(
            {"at": at, "cores_s": again("cores", before["cores"] - 1), "workers_s": again("workers", before["workers"])}
        )
    return rows


def held(lanes: Sequence[Mapping[str, Any]], run: str, what: str, at: float) -> int:
    """What a run held at a moment."""
    return sum(
        lane[what]
        for lane in lanes
        if lane["run"] == run and lane["since"] <= at and (lane["until"] is None or at < lane["until"])
    )


# -- the command -------------------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda seed: searched(replace(ASHA, way="plain", shared=None, seed=seed)),
    "offload": lambda seed: searched(replace(ASHA, seed=seed)),
    "one-folder": lambda seed: searched(replace(ASHA, shared="ssd:FOLDER/shared:200MB", seed=seed)),
    "apart": lambda seed: searched(replace(ASHA, shared=None, seed=seed)),
    "population": lambda seed: searched(replace(POPULATION, seed=seed), accelerators=3),
}


@click.command(help=__doc__)
@click.option(
    "--row", "rows", multiple=True, type=click.Choice(list(ROWS)), help="Measure this row alone. [repeatable]"
)
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1), help="Seeds of each row.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON only.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(rows: tuple[str, ...], repeats: int, as_json: bool, output: Path | None) -> None:
    more = {
        "benchmark": "tuning",
        "claim": "eight trials with ASHA end in 0.6 of the time of plain Ray Tune, Ray Train and Ray Data, with as good a trial",
        "paced": {"asha": asdict(ASHA), "population": asdict(POPULATION)},
        "hosts": {name: {"cores": CORES, "accelerators": ACCELERATORS} for name in HOSTS},
    }
    results = Results(
        output,
        ["python", "benchmarks/tuning.py", *sys.argv[1:]],
        more,
        lambda rows: {"summary": summary(rows)},
        show=lambda row: print(f"{row['row']}, seed {row['seed']}: {row['seconds']:.0f} s", file=sys.stderr),
    )
    for seed, row in itertools.product(range(repeats), rows or ROWS):
        key = {"row": row, "seed": seed}
        if not results.has(key):
            measured_row = ROWS[row](seed)
            results.add(key, measured_row | {"processes_ready_to_run": round(os.getloadavg()[1], 1)})
    results.write()
    if as_json:
        print(json.dumps(results.document()))
        return
    Console().print(table(results.document()["summary"]))
    for row in results.rows:
        if row["row"] == "population":
            Console().print(of_population(row))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The medians of each way's rows; times until freed resources are in use again over all ends of trials."""
    lines = {}
    of_plain = [row["seconds"] for row in rows if row["row"] == "plain"]
    for name in ("plain", "offload", "one-folder", "apart"):
        mine = [row for row in rows if row["row"] == name]
        if not mine:
            continue
        seconds = statistics.median(row["seconds"] for row in mine)
        line = {
            "runs": len(mine),
            "seconds": seconds,
            "over_plain": seconds / statistics.median(of_plain) if of_plain else None,
            "decoded_over_one_trial": statistics.median(row["decoded_over_one_trial"] for row in mine),
            "epochs": [row["epochs"] for row in mine],
            "best_rates": [row["best_rate"] for row in mine],
            "best_accuracies": [row["best_accuracy"] for row in mine],
        }
        for what in ("cores", "workers"):
            again = [end[f"{what}_s"] for row in mine for end in row["again_in_use"] if end[f"{what}_s"] is not None]
            line[f"{what}_again_s"] = {"median": statistics.median(again), "most": max(again)} if again else None
        lines[name] = line
    return lines


def table(lines: Mapping[str, Mapping[str, Any]]) -> Table:
    """The summary for a terminal."""
    shown = Table(
        "row", "seconds", "÷ plain", "decoded ÷ one trial", "epochs", "best rate", "its accuracy", "cores again in use, s",
        "accelerators, s", title="Eight trials with ASHA, paced, on two emulated hosts",
    )  # fmt: skip
    for name, line in lines.items():
        again = [line[f"{what}_again_s"] for what in ("cores", "workers")]
        shown.add_row(
            name,
            f"{line['seconds']:.0f}",
            "" if line["over_plain"] is None else f"{line['over_plain']:.2f}",
            f"{line['decoded_over_one_trial']:.2f}",
            ", ".join(map(str, line["epochs"])),
            ", ".join(f"{rate:g}" for rate in line["best_rates"]),
            ", ".join(f"{accuracy:.3f}" for accuracy in line["best_accuracies"]),
            *("" if times is None else f"{times['median']:.1f} ({times['most']:.1f})" for times in again),
        )
    return shown


def workers_of(row: Mapping[str, Any], trial: str, at: float) -> int:
    """The workers of a trial at a moment, whichever run it has then."""
    return max((held(row["lanes"], run, "workers", at) for run in runs_of(row["lanes"], trial)), default=0)


def runs_of(lanes: Sequence[Mapping[str, Any]], trial: str) -> set[str]:
    """The runs of a trial, which are several after an exchange."""
    return {lane["run"] for lane in lanes if re.sub(r"-\d+$", "", lane["run"]) == trial}


def of_population(row: Mapping[str, Any]) -> Table:
    """The workers of the best trial and of the others, at the results that made it the best."""
    shown = Table("s", "trial", "epoch", "accuracy", "workers", title=f"Population, {row['seconds']:.0f} s")
    for event in row["events"]:
        if event["event"] == "result":
            workers = workers_of(row, event["trial"], event["at"])
            accuracy = f"{event['accuracy']:.3f}"
            shown.add_row(f"{event['at']:.0f}", event["trial"], str(event["epoch"]), accuracy, str(workers))
    return shown


if __name__ == "__main__":
    main()
