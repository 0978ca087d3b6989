"""Are the ratios that matter as good as recorded? Ten minutes on two idle cores.

    make bench                               # compares with benchmarks/results/guard.json; exit code 1 if a ratio is worse
    make bench ARGS="--record"               # records this machine's ratios instead
    python benchmarks/guard.py --only loader # one part alone

First the noise of this machine is measured: a plain loop, several times. A ratio is worse if it is beyond its record by more than three
standard errors of both medians. A repeat's relative error is that of the plain loop at least. Only ratios are compared, each taken side
by side on one machine, so that a record of another machine serves too. An idle machine decides: other programs show as noise.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import workloads
from benchmarks.side_by_side import ROOT, machine, versions
from tests.programs import cpu_minutes

RECORD = ROOT / "benchmarks" / "results" / "guard.json"
ERRORS = 3.0  # standard errors: of a dozen ratios, one in a hundred runs is worse by chance
MEDIAN_OVER_MEAN = 1.25  # the standard error of a median over that of a mean, for normal errors
LOOPS, LOOP_S = 12, 1.0
DEADLINE_S = 900
# Files of the suite that stand for all: pure tests, worker processes of this machine, a run on a real Ray, a page in a browser.
SUITE = ("tests/adapt", "tests/loader/test_same_as_torch.py", "tests/train/driver/test_ray_contract.py")
IMPORTS = "import torch, torchvision, ray, offload"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One ratio: its name in words, and whether more of it is better. ``error``: a distance from 1, whose record may be 0."""

    says: str
    higher_is_better: bool = False
    error: bool = False


FIGURES = {
    "delivered": Figure(says="offload.DataLoader on jpeg: samples/s ÷ those of plain loops on all cores", higher_is_better=True),
    "cpu": Figure(says="its CPU time a sample ÷ the plain loop's"),
    "first_batch": Figure(says="its first batch, from the start of the script ÷ torch's DataLoader"),
    "resize": Figure(says="a resize, seconds without steps ÷ the least: plain Ray actors in the place of others"),
    "recovery": Figure(says="a killed worker, seconds to the next step ÷ the same least"),
    "prediction": Figure(says="predicted ÷ measured samples/s, distance from 1", error=True),
    "suite": Figure(says="CPU time of a part of the tests ÷ that of importing torch, torchvision, ray and offload"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a figure compares with its record."""

    record: float
    value: float
    allowed: float
    """The worst value that the noise explains."""
    worse: bool


def judge(record: Sequence[float], values: Sequence[float], figure: Figure, noise: float) -> Verdict:
    """Compare the medians of two series of repeats.

    Args:
        record, values: the repeats of the record, and today's. Positive, unless ``figure.error``.
        noise: the relative standard deviation of a plain loop on this machine: what a single repeat is uncertain by at least.
    """
    before, now = statistics.median(record), statistics.median(values)
    margin = ERRORS * math.hypot(*(_standard_error(series, noise, figure.error) for series in (record, values)))
    if figure.error:
        allowed = before + margin
        return Verdict(record=before, value=now, allowed=allowed, worse=now > allowed)
    allowed = before * math.exp(-margin if figure.higher_is_better else margin)
    worse = now < allowed if figure.higher_is_better else now > allowed
    return Verdict(record=before, value=now, allowed=allowed, worse=worse)


def _standard_error(series: Sequence[float], noise: float, absolute: bool) -> float:
    """That of the median: of the values themselves, or of their logarithms."""
    values = series if absolute else [math.log(value) for value in series]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return MEDIAN_OVER_MEAN * max(spread, noise) / math.sqrt(len(values))


def measure_noise() -> float:
    """Return the relative standard deviation of the rate of a plain loop that runs for a second."""
    work = workloads.get("blur-uint8", None)
    rates = []
    for _ in range(LOOPS + 1):
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + LOOP_S:
            work.make(count)
            count += 1
        rates.append(count / (time.perf_counter() - began))
    rates = rates[1:]  # the first one warms up
    return statistics.stdev(rates) / statistics.mean(rates)


def measure_loader(folder: Path, repeats: int) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {"delivered": [], "cpu": [], "first_batch": []}
    for repeat in range(repeats):
        into = folder / f"loader-{repeat}.json"
        rows = ["--row", "plain", "--row", "torch", "--row", "offload"]
        _benchmark("one_machine.py", "--workload", "jpeg", *rows, "--repeats", "1", "--seconds", "4", "-o", str(into))
        result = json.loads(into.read_text())
        plain, ours = result["rows"]["jpeg"]["plain"], result["rows"]["jpeg"]["offload"]
        values["delivered"].append(ours["samples_per_s"] / plain["samples_per_s"] / result["workers"])
        values["cpu"].append(ours["cpu_over_plain"])
        values["first_batch"].append(ours["first_batch_s_over_torch"])
    return values


def measure_elastic(folder: Path, repeats: int) -> dict[str, list[float]]:
    into = folder / "elastic.json"
    only = ["--only", "floor", "--only", "resize", "--only", "worker"]
    _benchmark("recovery.py", *only, "--repeats", str(repeats), "--into", str(into))
    (document,) = json.loads(into.read_text()).values()
    seconds = document["each"]["offload"]
    floors = seconds["floor"]
    return {
        name: [value / floor for value, floor in zip(seconds[part], floors, strict=True)]
        for name, part in (("resize", "resize"), ("recovery", "worker"))
    }


def measure_prediction(folder: Path, repeats: int) -> dict[str, list[float]]:
    into = folder / "prediction.json"
    short = ["--here", str(repeats), "--seconds", "18", "--loop-seconds", "4"]
    _benchmark("prediction.py", "--workload", "blur-uint8", *short, "-o", str(into))
    return {"prediction": [abs(case["error"]) for case in json.loads(into.read_text())["cases"]]}


def measure_suite(folder: Path, repeats: int) -> dict[str, list[float]]:
    imports = statistics.median(_cpu_s([sys.executable, "-c", IMPORTS]) for _ in range(3))
    return {"suite": [_cpu_s([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE]) / imports]}


PARTS: Mapping[str, Callable[[Path, int], dict[str, list[float]]]] = {
    "loader": measure_loader,
    "elastic": measure_elastic,
    "prediction": measure_prediction,
    "suite": measure_suite,
}


def _benchmark(program: str, *arguments: str) -> None:
    _run([sys.executable, f"benchmarks/{program}", *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise click.ClickException(
            f"{' '.join(command[1:])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )


def _cpu_s(command: Sequence[str]) -> float:
    """The CPU seconds of a command and of all that it starts."""
    meter = cpu_minutes.meter()
    try:
        _run(command)
        return meter.cpu_s()
    finally:
        meter.close()


@click.command(help=__doc__)
@click.option("--only", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Measure these parts alone.")
@click.option(
    "--repeats",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of the parts loader, elastic and prediction.",
)
@click.option("--record", is_flag=True, help="Write today's figures into the record instead of judging them.")
@click.option("--against", type=click.Path(path_type=Path), default=RECORD, show_default=False, help="Another record.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def main(parts: tuple[str, ...], repeats: int, record: bool, against: Path, as_json: bool) -> None:
    recorded: dict[str, Any] = json.loads(against.read_text()) if against.exists() else {}
    if not recorded and not record:
        raise click.UsageError(f"{against} is no record: make one on an idle machine with --record")
    console = Console(stderr=True)
    noise = measure_noise()
    console.print(f"noise of this machine: {noise:.1%}")
    repeated: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        for part in parts or PARTS:
            began = time.monotonic()
            measured = PARTS[part](Path(folder), repeats)
            repeated |= {name: [round(value, 4) for value in series] for name, series in measured.items()}
            console.print(f"{part}: {time.monotonic() - began:.0f} s")
    document: dict[str, Any] = {
        "benchmark": "guard",
        "claim": "the ratios that matter are as good as recorded",
        "command": " ".join(["python", "benchmarks/guard.py", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "noise": round(noise, 4),
        "figures": {name: FIGURES[name].says for name in repeated},
        "repeats": repeated,
        "medians": {name: statistics.median(series) for name, series in repeated.items()},
    }
    if record:
        document["repeats"] = {**recorded.get("repeats", {}), **repeated}
        document["medians"] = {**recorded.get("medians", {}), **document["medians"]}
        document["figures"] = {name: FIGURES[name].says for name in document["repeats"]}
        against.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"recorded in {against}")
    verdicts = {
        name: judge(recorded["repeats"][name], series, FIGURES[name], max(noise, recorded["noise"]))
        for name, series in repeated.items()
        if not record and name in recorded["repeats"]
    }
    if as_json:
        click.echo(json.dumps({**document, "verdicts": {name: vars(verdict) for name, verdict in verdicts.items()}}))
    else:
        _show(repeated, verdicts)
    worse = [name for name, verdict in verdicts.items() if verdict.worse]
    if worse:
        console.print(f"worse than recorded, beyond the noise: {', '.join(worse)}")
        sys.exit(1)


def _show(repeated: Mapping[str, Sequence[float]], verdicts: Mapping[str, Verdict]) -> None:
    table = Table("ratio", "recorded", "now", "allowed", "", title="The ratios that matter")
    for name, series in repeated.items():
        verdict, figure = verdicts.get(name), FIGURES[name]
        bound = "" if verdict is None else f"{'≥' if figure.higher_is_better else '≤'} {verdict.allowed:.3f}"
        table.add_row(
            figure.says,
            "" if verdict is None else f"{verdict.record:.3f}",
            f"{statistics.median(series):.3f}",
            bound,
            "" if verdict is None else ("worse" if verdict.worse else "holds"),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
