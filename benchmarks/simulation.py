"""Time and dollars of policies at a scale that nobody here has, by simulation: 8 to 1,024 GPUs with up to 10,000 CPU cores.

    python benchmarks/simulation.py -o benchmarks/results/simulation.json     # all parts; ten minutes on one core
    python benchmarks/simulation.py --part validation
    python benchmarks/simulation.py --part regret --questions 50
    python benchmarks/simulation.py --part scale --gpus 8 --gpus 64 --seeds 1

``validation``: the simulator beside the recorded runs of this project, each case with its error. ``hub``: the number of cores at which one
feed ends. ``scale``: hours and dollars to train typical jobs, by policy. ``regret``: how much worse than the exhaustive optimum each
policy's choice is, over random jobs and price tables; a tenth of them also without the hub's limit. "The simulator's equations" choose
by the same probe and catalog, so that none of their regret is a model's.

Nothing depends on the machine but the seconds that the command takes. :mod:`benchmarks.simulator` says what is simulated.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import hardware, versions
from benchmarks.simulator import hub, regret, scaling, validation
from benchmarks.simulator.policies import POLICIES

PARTS = ("validation", "hub", "scale", "regret")
QUESTIONS, SEEDS = 1000, 3
UNLIMITED_SHARE = 10  # of the random jobs, the first tenth is judged without the hub's limit, too
CHUNK = 25  # random jobs between two writes of the result
SHOWN = 12  # of the largest errors


def _gpus(context: click.Context, parameter: click.Parameter, counts: tuple[int, ...]) -> tuple[int, ...]:
    for count in counts:
        if count not in scaling.GPUS:
            raise click.BadParameter(
                f"{count} GPUs are not simulated. Give one of {', '.join(map(str, scaling.GPUS))}."
            )
    return counts or scaling.GPUS


def _output(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(
            f"the folder {path.parent} of {path.name} does not exist. Make it, or name another file."
        )
    return path


@click.command(help=__doc__)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; may repeat.  [default: all]"
)
@click.option(
    "--questions", default=QUESTIONS, show_default=True, type=click.IntRange(1), help="Random jobs with price tables."
)
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0), help="Of the random jobs.")
@click.option(
    "--gpus", multiple=True, type=int, callback=_gpus, help="Only this scale; may repeat.  [default: 8 to 1,024]"
)
@click.option("--seeds", default=SEEDS, show_default=True, type=click.IntRange(1), help="Of each run at scale.")
@click.option(
    "--resume", is_flag=True, help="Keep the parts and the random jobs that the output holds, and add the others."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_output,
    help="Write the result there as JSON.",
)
def main(
    parts: tuple[str, ...],
    resume: bool,
    questions: int,
    first_seed: int,
    gpus: tuple[int, ...],
    seeds: int,
    as_json: bool,
    output: Path | None,
) -> None:
    began = time.process_time()
    console = Console(stderr=as_json, width=150)
    document: dict[str, Any] = {
        "benchmark": "simulation",
        "claim": "what offload plan chooses costs at most 3 % more than the best of all in the median, and 10 % at worst",
        "command": shlex.join(["python", "benchmarks/simulation.py", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": hardware(),
        "versions": versions(),
        "simulated": True,
    }
    before = json.loads(output.read_text(encoding="utf-8")) if resume and output is not None and output.exists() else {}
    spent_s = float(before.get("cpu_s", 0.0))

    def write() -> None:
        document["cpu_s"] = round(spent_s + time.process_time() - began, 1)
        if output is not None:
            output.write_text(_text(document), encoding="utf-8")

    document |= {part: before[part] for part in PARTS if part in before}
    for part in parts or PARTS:
        if part == "regret":
            document[part] = before.get(part, {})
            _regretted(console, document[part], range(first_seed, first_seed + questions), write)
        elif part in before:
            continue
        elif part == "validation":
            document[part] = _validated(console)
        elif part == "hub":
            document[part] = {"node": hub.NODE, "rows": hub.table()}
            console.print(_hub_table(document[part]["rows"]))
        else:
            document[part] = {"seeds": list(range(seeds)), "rows": scaling.table(gpus, range(seeds))}
            console.print(_scale_table(document[part]["rows"]))
        write()
    if as_json:
        click.echo(json.dumps(document))


def _text(document: dict[str, Any]) -> str:
    """The document as JSON, with a line for each row of a table."""
    rows: list[str] = []

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: [placed_row(row) for row in each] if key == "rows" else placed(each) for key, each in value.items()
            }
        return value

    def placed_row(row: Any) -> str:
        rows.append(json.dumps(row))
        return f"row {len(rows) - 1}"

    text = json.dumps(placed(document), indent=1)
    return re.sub(r'"row (\d+)"', lambda found: rows[int(found[1])], text) + "\n"


def _validated(console: Console) -> dict[str, Any]:
    rows = validation.table()
    beside = validation.beside_the_feed()
    result: dict[str, Any] = {
        "goal": validation.GOAL,
        **validation.summary(rows),
        "rows": rows,
        "left_out": validation.LEFT_OUT,
        "beside_the_feed": {"worst_error": max(abs(row["error"]) for row in beside), "rows": beside},
    }
    table = Table(title=f"The {SHOWN} largest errors of {len(rows)} recorded cases")
    for name in ("record", "case", "simulated", "measured", "error"):
        table.add_column(name, justify="left" if name in ("record", "case") else "right")
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:SHOWN]:
        table.add_row(
            row["record"], row["case"], f"{row['simulated']:,.4g}", f"{row['measured']:,.4g}", f"{row['error']:+.1%}"
        )
    console.print(table)
    console.print(
        f"error: {result['median_error']:.1%} in the median, {result['worst_error']:.1%} at worst; {result['within_goal']} of {len(rows)} "
        f"within {validation.GOAL:.0%}."
    )
    console.print(
        f"Beside the feed's own code, block by block: {result['beside_the_feed']['worst_error']:.1%} at worst."
    )
    return result


def _regretted(console: Console, result: dict[str, Any], seeds: range, write: Callable[[], None]) -> None:
    """Add the questions of these seeds that the result lacks, and write it now and then."""
    result["goal"] = {"median": regret.GOAL_MEDIAN, "worst": regret.GOAL_WORST}
    for name, limit, share in (("with the hub's limit", True, 1), ("without it", False, UNLIMITED_SHARE)):
        rows = result.get(name, {}).get("rows", [])
        known = {row["seed"] for row in rows}
        missing = [seed for seed in seeds[: -(-len(seeds) // share)] if seed not in known]
        chunks = [missing[at : at + CHUNK] for at in range(0, len(missing), CHUNK)]
        for chunk in track(chunks, name, console=Console(stderr=True)):
            rows += regret.regrets(chunk, hub=limit)
            result[name] = {"summary": regret.summary(rows), "rows": rows}
            write()
        title = f"Above the best of all, over {len(rows)} random jobs, {name}"
        console.print(_regret_table(title, result[name]["summary"]))
        for row in (row for row in rows if "told" in row):
            told = "; ".join(
                f"{each['offload plan']:.1%} and {each['offload run']:.1%} if the catalog were right about {about}"
                for about, each in row["told"].items()
            )
            console.print(
                f"Job {row['seed']}: the plan is {row['regret']['offload plan']:.1%} above the best of all, the run "
                f"{row['regret']['offload run']:.1%}; {told}."
            )


def _regret_table(title: str, summary: dict[str, dict[str, float]]) -> Table:
    table = Table(title=title)
    for name in ("policy", "median", "90 %", "99 %", "worst", "jobs above 10 %"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, row in summary.items():
        shown = (f"{row[name]:.1%}" for name in ("median", "p90", "p99", "worst"))
        table.add_row(policy, *shown, f"{row['above_10_percent']:,}")
    return table


def _scale_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Hours and dollars to train 2 million samples per GPU, spot CPU nodes")
    counts = sorted({row["gpus"] for row in rows})
    table.add_column("job")
    table.add_column("policy")
    for count in counts:
        table.add_column(f"{count} GPUs", justify="right")
    found = {(row["job"], row["policy"], row["gpus"]): row for row in rows}
    for job in dict.fromkeys(row["job"] for row in rows):
        for policy in (*POLICIES, "optimum"):
            cells = [found.get((job, policy, count)) for count in counts]
            table.add_row(
                job, policy, *("" if row is None else f"{row['hours']:.2f} h\n${row['usd']:,.0f}" for row in cells)
            )
        table.add_section()
    return table


def _hub_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Cores of {hub.NODE} at which one feed ends, and several")
    for name in (
        "sample",
        "ranks",
        "core-ms",
        "kB",
        "rows a block",
        "blocks/s",
        "samples/s",
        *(f"{feeds} feeds" for feeds in hub.FEEDS),
    ):
        table.add_column(name, justify="left" if name == "sample" else "right")
    for row in rows:
        cores = [row["ends_at_cores"], *(row[f"with_{feeds}_feeds_cores"] for feeds in hub.FEEDS[1:])]
        table.add_row(
            row["sample"], f"{row['ranks']}", f"{row['core_ms']:g}", f"{row['kb']:g}", f"{row['rows_per_block']:,}",
            f"{row['blocks_per_s']:.0f}", f"{row['ends_at_samples_per_s']:,}",
            *(f"{count:,}" if count < hub.MOST_CORES else f"> {hub.MOST_CORES:,}" for count in cores),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
