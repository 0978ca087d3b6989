"""What one hub can do: CPU time of a block, blocks and samples a second, memory and start, by the numbers of cores and workers.

    python benchmarks/scale.py [--repeats 3] [--case stood-1000-64] [-o benchmarks/results/scale.json]

A case's name is its kind, its cores and its workers; ``stood`` ones may name a number of feeds, among which cores and workers are divided.

* ``alone``: the feed's own code without Ray, on cores that answer at once, where workers wait for blocks.
* ``full``: the same where cores wait for room.
* ``stood``: the whole hub on a local Ray. Its cores sleep instead of working, and its workers fetch and count. A thousand processes do
  not fit a small machine: one stands for 125 cores, and another for the workers of a node.
* ``real``: the same, with a process for each core.

Nodes are names: 16 cores and, on the first ones, 8 workers each. The clock of a large cluster runs slower than that of the machine
(``slower``): blocks come at a rate for which the machine's cores have time. Rates are those of the machine's clock. The hub's limit is
``ceiling_blocks_per_s``, a core's second divided by its CPU time of a block, summed over feeds; the cluster asks for
``asked_blocks_per_s``. If ``taken_over_made`` is far from 1, the stand-ins did not keep up, and the other figures say little.
"""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side

CASES = (
    "alone-64-1", "alone-250-8", "alone-500-8", "alone-1000-1", "alone-1000-8", "alone-1000-64", "full-64-1", "full-1000-64",
    "real-64-1", "stood-64-1", "stood-250-8", "stood-1000-8", "stood-1000-64",
    "stood-1000-64-2", "stood-1000-64-4",
)  # fmt: skip
BLOCKS = 2000  # of a case without Ray


def _checked(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"(alone|full|real)-[1-9]\d*-[1-9]\d*|stood-[1-9]\d*-[1-9]\d*(-[1-9]\d*)?", name):
            raise click.BadParameter(
                f"{name!r} is no case. Give kind, cores and workers, such as stood-1000-64; or stood-1000-64-2 for two feeds."
            )
    return names


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=30.0, show_default=True, help="The least measured time of each case on Ray.")
@click.option(
    "--case",
    "chosen",
    multiple=True,
    callback=_checked,
    help="Only these cases, such as stood-1000-64.  [default: all]",
)
@click.option("--measure", is_flag=True, hidden=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON, beside other cases in it."
)
def main(repeats: int, seconds: float, chosen: tuple[str, ...], measure: bool, output: Path | None) -> None:
    if measure:
        print(json.dumps(_measured(chosen[0], seconds)))
        return
    names = chosen or CASES
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            command = [sys.executable, __file__, "--measure", "--case", name, "--seconds", str(seconds)]
            env = {**os.environ, **side_by_side.ENVIRONMENT}
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
            if ran.returncode:
                raise click.ClickException(f"{name} has failed, for the reason above.")
            found[name].append(json.loads(ran.stdout.splitlines()[-1]))
            print(name, json.dumps(found[name][-1]), file=sys.stderr, flush=True)
            if output is not None:
                _write(output, {name: found[name]})
    for name, runs in found.items():
        print(name, ", ".join(f"{key} {value:,.4g}" for key, value in _medians(runs).items()))


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _write(output: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Write these cases, beside the others in the file."""
    cases = json.loads(output.read_text())["cases"] if output.exists() else {}
    for name, runs in found.items():
        cases[name] = {
            "medians": _medians(runs),
            "repeats": runs,
            "command": shlex.join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
            "machine": side_by_side.machine(),
            "versions": side_by_side.versions(),
        }
    output.write_text(json.dumps({"benchmark": "scale", "cases": cases}, indent=1) + "\n")


def _measured(case: str, seconds: float) -> dict[str, float]:
    kind, cores, workers, *feeds = case.split("-")
    if kind in ("alone", "full"):
        from benchmarks import hub_alone

        return hub_alone.measured(int(cores), int(workers), BLOCKS, full=kind == "full")
    from benchmarks import hub_on_ray

    return hub_on_ray.measured(
        "real" if kind == "real" else "stood", int(cores), int(workers), seconds, *map(int, feeds)
    )


if __name__ == "__main__":
    main()
