"""How far the model is from a simulation of what it models.

    python benchmarks/model_check.py network -o result.json
    python benchmarks/model_check.py links -o result.json
    python benchmarks/model_check.py decisions -o result.json
    python benchmarks/model_check.py coverage -o result.json
    python benchmarks/model_check.py noise -o result.json

``network``: the model's input rate beside the project's own feed on a simulated clock (:mod:`benchmarks.simulated`), for GPU nodes and CPU
nodes on links of several speeds. Nothing of it depends on the machine.

``links``: the model's input rate beside runs of real processes on emulated hosts (:mod:`benchmarks.slow_links`), each predicted first.
``decisions``: dollars that rules for the number of cores cost in simulated worlds (:mod:`benchmarks.decision_worlds`), and time that rules
for the batch cost while the gradient noise changes (:mod:`benchmarks.batch_worlds`).

``coverage``: how often the 95 % range of a plan holds the truth, in random worlds that a simulated probe measured
(:mod:`benchmarks.worlds`).

``noise``: the goodput that a plan loses because a probe saw few gradients (:mod:`benchmarks.noise_worlds`).
"""

import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import batch_worlds, decision_worlds, joint_worlds, noise_worlds, side_by_side
from benchmarks.simulated import Node, World, simulate
from benchmarks.slow_links import PAYLOAD, Link, core_seconds, measure
from benchmarks.worlds import SCENARIOS, outcome
from benchmarks.worlds import coverage as covered
from offload.model.catalog import NodeType, Shape
from offload.model.input_rate import BYTES_PER_GIGABIT, NETWORK_EFFICIENCY, InputRate


class Case(NamedTuple):
    """GPU nodes and CPU nodes, the cores of each, their links in Gb/s, and a sample's core-seconds and bytes. ``workers``: on each GPU
    node."""

    gpu_nodes: int
    gpu_cores: int
    cpu_nodes: int
    cpu_cores: int
    gbps: float
    core_seconds: float
    size_bytes: float
    workers: int = 1

    @property
    def label(self) -> str:
        return (
            f"{self.gpu_nodes} × {self.gpu_cores} + {self.cpu_nodes} × {self.cpu_cores} cores, {self.gbps:g} Gb/s, "
            f"{1000 * self.core_seconds:g} ms, {self.size_bytes / 1000:g} kB"
        )

    def model(self) -> float:
        """Samples/s by the model."""
        parts: Any = {"memory_gib": 64.0, "network_gbps": self.gbps, "usd_per_hour": 1.0}
        gpu = NodeType(name="gpu", vcpus=self.gpu_cores, gpus=self.workers, **parts)
        cpu = NodeType(name="cpu", vcpus=self.cpu_cores, gpus=0, **parts)
        rate = InputRate(
            core_seconds_per_sample=self.core_seconds, wire_bytes_per_sample=self.size_bytes, host_cpus_per_worker=0.0
        )
        shape = Shape({gpu: self.gpu_nodes, cpu: self.cpu_nodes})
        return float(rate.samples_per_s(shape, self.gpu_nodes * self.workers))

    def world(self, seconds: float, *, ordered: bool) -> World:
        """The same for the simulation: two epochs of about so many seconds each."""
        speed = NETWORK_EFFICIENCY * BYTES_PER_GIGABIT * self.gbps
        gpus = [
            Node(name=f"gpu{i}", cores=self.gpu_cores, bytes_per_s=speed, workers=self.workers)
            for i in range(self.gpu_nodes)
        ]
        cpus = [Node(name=f"cpu{i}", cores=self.cpu_cores, bytes_per_s=speed) for i in range(self.cpu_nodes)]
        return World(
            nodes=(*gpus, *cpus),
            core_seconds_per_sample=self.core_seconds,
            bytes_per_sample=self.size_bytes,
            samples=int(self.model() * seconds),
            ordered=ordered,
        )


ONE_HOST = [
    Case(1, gpu_cores, cpu_nodes, 16, gbps, 0.010, size)
    for gpu_cores, gbps, size in itertools.product((7, 47), (5.0, 10.0, 25.0), (150e3, 602e3))
    for cpu_nodes in (0, 1, 2, 4, 8)
]
SEVERAL_HOSTS = [
    Case(gpu_nodes, 31, cpu_nodes, 16, 10.0, core_seconds, 150e3, workers=4)
    for gpu_nodes, core_seconds in itertools.product((2, 4), (0.0012, 0.010))
    for cpu_nodes in (0, 2, 4)
]


PARTS: dict[str, Callable[[Sequence[int]], list[dict[str, Any]]]] = {
    "cores": lambda seeds: decision_worlds.table(seeds, priced=False),
    "priced cores": lambda seeds: decision_worlds.table(seeds, priced=True),
    "batches": batch_worlds.table,
    "all three": joint_worlds.table,
}


@click.group()
def main() -> None:
    """Compare the model with simulations."""


@main.command()
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(min=1), help="Of a simulated epoch.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def network(seconds: float, output: Path | None) -> None:
    """Input rates: the model beside the feed on a simulated clock."""
    rows = []
    for case in (*ONE_HOST, *SEVERAL_HOSTS):
        model = case.model()
        measured = {
            name: simulate(case.world(seconds, ordered=name == "deterministic")) for name in ("feed", "deterministic")
        }
        row = {
            "case": case.label,
            "cpu_nodes": case.cpu_nodes,
            "model_samples_per_s": round(model, 1),
            "feed_samples_per_s": round(measured["feed"].samples_per_s, 1),
            "deterministic_samples_per_s": round(measured["deterministic"].samples_per_s, 1),
            "near_share": round(measured["feed"].near_share, 3),
        }
        rows.append(row)
        click.echo(
            f"{case.label:62} model {model:9,.0f}  feed {_off(row, 'feed')}  deterministic {_off(row, 'deterministic')}"
        )
    summary = {name: _summary(rows, name) for name in ("feed", "deterministic")}
    for name, each in summary.items():
        click.echo(
            f"{name}: off by {each['median_error']:.1%} in the median, {each['worst_error']:.1%} at worst. More CPU nodes change the "
            f"rate by {each['worst_change_by_nodes']:+.1%} at worst."
        )
    if output is not None:
        result = {"command": shlex.join(["python", *sys.argv]), "seconds": seconds, "summary": summary, "rows": rows}
        output.write_text(json.dumps(result, indent=1) + "\n")


CASES = [
    Link(near, 8, mbit_per_s, 0.02, size_bytes)
    for near, mbit_per_s, size_bytes in itertools.product((3, 9), (40.0, 160.0, 640.0), (50_000, 100_000, 200_000))
]


@main.command()
@click.option("--seconds", default=25.0, show_default=True, type=click.FloatRange(min=5), help="Of a run, about.")
@click.option("--deterministic", is_flag=True, help="Let all runs have deterministic=True.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def links(seconds: float, deterministic: bool, output: Path | None) -> None:
    """Input rates: the model beside real processes behind slow links."""
    w = core_seconds(CASES[0].seconds)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        alone, together = (
            Case(1, case.near_cores, nodes, case.far_cores, _gbps(case), w, case.size_bytes).model() for nodes in (0, 1)
        )
        samples = int(together * seconds)
        row: dict[str, Any] = {**case._asdict(), "model_samples_per_s": round(together, 1)}
        row["without_cpu_host_samples_per_s"] = round(alone, 1)
        rates = measure(case, samples, deterministic=deterministic)
        row["measured_samples_per_s"] = round(rates.steady, 1)
        row["to_the_end_samples_per_s"] = round(rates.to_the_end, 1)
        rows.append(row)
        error = row["model_samples_per_s"] / row["measured_samples_per_s"] - 1
        click.echo(
            f"{case.near_cores} + {case.far_cores} cores, {case.mbit_per_s:3.0f} Mbit/s, {case.size_bytes / 1000:3.0f} kB: "
            f"model {together:6.1f} ({alone:5.1f} without the CPU host), measured {row['measured_samples_per_s']:6.1f}: "
            f"off by {error:+.1%}, {row['to_the_end_samples_per_s']:6.1f} to the end"
        )
    errors = [abs(row["model_samples_per_s"] / row["measured_samples_per_s"] - 1) for row in rows]
    slower = [row["to_the_end_samples_per_s"] / row["without_cpu_host_samples_per_s"] - 1 for row in rows]
    summary = {
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "least_gain_by_the_cpu_host": round(min(slower), 4),
    }
    click.echo(
        f"off by {summary['median_error']:.1%} in the median, {summary['worst_error']:.1%} at worst; with the CPU host the rate is "
        f"at least {1 + summary['least_gain_by_the_cpu_host']:.2f} times that of the model without it"
    )
    if output is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": side_by_side.machine(),
            "versions": side_by_side.versions(),
            "seconds": seconds,
            "core_seconds_per_sample": round(w, 5),
            "summary": summary,
            "rows": rows,
        }
        output.write_text(json.dumps(result, indent=1) + "\n")


def _gbps(case: Link) -> float:
    """The link as the model counts it: it takes only a part of a card's nominal bandwidth for payload."""
    return case.mbit_per_s / 1000 * PAYLOAD / NETWORK_EFFICIENCY


@main.command()
@click.option("--worlds", default=40, show_default=True, type=click.IntRange(min=1), help="Random worlds of each kind.")
@click.option(
    "--first-seed",
    default=0,
    show_default=True,
    help="Of the worlds. The constants of the rules were chosen on 0 to 39.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(list(PARTS)),
    help="Only this table; may repeat. Others stay in the result.",
)
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def decisions(worlds: int, first_seed: int, parts: Sequence[str], output: Path | None) -> None:
    """Cores, batches, and both with workers: dollars, time and changes of several rules, beside an oracle."""
    result: dict[str, Any] = json.loads(output.read_text()) if parts and output is not None and output.exists() else {}
    for part in parts or PARTS:
        rows = PARTS[part](range(first_seed, first_seed + worlds))
        for row in rows:
            click.echo(f"{part}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        result[part] = {"command": shlex.join(["python", *sys.argv]), "worlds": worlds, "rows": rows}
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


@main.command()
@click.option("--worlds", default=300, show_default=True, type=click.IntRange(min=20), help="Of each scenario.")
@click.option(
    "--seed", default=0, show_default=True, help="Of the worlds. The constants of the ranges were chosen on 0."
)
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def coverage(worlds: int, seed: int, output: Path | None) -> None:
    """Ranges of plans: how often they hold the truth, and their half-width beside an oracle's."""
    rows = []
    for scenario in SCENARIOS:
        rng = np.random.default_rng(seed)
        row = {"scenario": scenario.label, **covered([outcome(scenario, rng) for _ in range(worlds)])}
        rows.append(row)
        click.echo(
            f"{scenario.label:50} coverage {row['coverage']:6.1%}  half-width {row['half_width']:6.1%}  "
            f"{row['half_width_over_oracle']:5.2f} × the oracle's {row['oracle_half_width']:6.1%}"
        )
    if output is not None:
        output.write_text(
            json.dumps({"command": shlex.join(["python", *sys.argv]), "worlds": worlds, "rows": rows}, indent=1) + "\n"
        )


@main.command()
@click.option("--worlds", default=300, show_default=True, type=click.IntRange(min=20), help="Of each scenario.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def noise(worlds: int, output: Path | None) -> None:
    """Gradient noise: the goodput that few gradients lose, beside the rule before."""
    rows = []
    for scenario in noise_worlds.SCENARIOS:
        row: dict[str, Any] = {"scenario": scenario.label, **noise_worlds.losses(scenario, worlds)}
        rows.append(row)
        click.echo(
            f"{scenario.label:75} loses {row['median_loss']:6.1%} in the median, {row['p90_loss']:6.1%} in 90 % of worlds; before "
            f"{row['median_loss_before']:6.1%}, {row['p90_loss_before']:6.1%}; {row['mean_gradients']:.0f} gradients"
        )
    if output is not None:
        output.write_text(
            json.dumps({"command": shlex.join(["python", *sys.argv]), "worlds": worlds, "rows": rows}, indent=1) + "\n"
        )


def _off(row: dict[str, Any], name: str) -> str:
    rate = row[f"{name}_samples_per_s"]
    return f"{rate:9,.0f} ({rate / row['model_samples_per_s'] - 1:+6.1%})"


def _summary(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """How far the model is off, and the worst change of the rate that more CPU nodes bring."""
    errors = [abs(row["model_samples_per_s"] / row[f"{name}_samples_per_s"] - 1) for row in rows]
    changes = [
        after[f"{name}_samples_per_s"] / before[f"{name}_samples_per_s"] - 1
        for before, after in itertools.pairwise(rows)
        if after["cpu_nodes"] > before["cpu_nodes"]
    ]
    return {
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "worst_change_by_nodes": round(min(changes), 4),
    }


if __name__ == "__main__":
    main()
