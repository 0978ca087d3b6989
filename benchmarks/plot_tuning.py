"""Draws the row `population` of tuning.py: the workers of each trial over time, and which trial was the best.

python benchmarks/plot_tuning.py benchmarks/results/tuning.json -o benchmarks/results/tuning.png
"""

import json
import sys
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.tuning import runs_of

LABEL_WIDTH = 0.03  # of the figure: labels closer than this would cover each other
COLOURS = ("#2ca05a", "#4477aa", "#cc8844")


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(result: Path, output: Path) -> None:
    """Draw RESULT, the JSON file that tuning wrote."""
    row = next(row for row in json.loads(result.read_text())["rows"] if row["row"] == "population")
    results = [event for event in row["events"] if event["event"] == "result"]
    trials = sorted({event["trial"] for event in results})
    most = max(lane["workers"] for lane in row["lanes"])
    figure, axes = plt.subplots(
        len(trials), 1, figsize=(7.2, 1.3 * len(trials) + 0.5), sharex=True, constrained_layout=True
    )
    best = best_over_time(results, row["seconds"])
    for axis, trial, colour in zip(axes, trials, COLOURS, strict=False):
        for since, until, leader in best:
            if leader == trial:
                axis.axvspan(since, until, color="#f4e9b8", lw=0)
        for lane in row["lanes"]:
            if lane["run"] in runs_of(row["lanes"], trial):
                until = row["seconds"] if lane["until"] is None else lane["until"]
                axis.fill_between([lane["since"], until], 0, lane["workers"], color=colour, lw=0)
        written_at = -row["seconds"]
        for event in results:
            if event["trial"] == trial and event["at"] - written_at > LABEL_WIDTH * row["seconds"]:
                written_at = event["at"]
                axis.annotate(
                    f"{event['accuracy']:.0%}",
                    (event["at"], most),
                    ha="center",
                    va="bottom",
                    fontsize=6,
                    color="#444444",
                )
        axis.set(ylim=(0, most + 0.9), yticks=range(most + 1))
        axis.set_ylabel(f"trial {trials.index(trial) + 1}\nworkers", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds since the start of the search", fontsize=8)
    axes[-1].set_xlim(0, row["seconds"])
    figure.suptitle("Population-based training: the best trial (shaded) gets the workers; above, accuracy", fontsize=9)
    figure.savefig(output, dpi=150)


def best_over_time(results: list[dict[str, object]], end: float) -> list[tuple[float, float, str]]:
    """From when to when which trial had the best newest result."""
    newest: dict[str, float] = {}
    spans: list[tuple[float, float, str]] = []
    for event in results:
        newest[str(event["trial"])] = float(str(event["accuracy"]))
        at, leader = float(str(event["at"])), max(newest, key=lambda trial: newest[trial])
        if spans and spans[-1][2] == leader:
            continue
        if spans:
            spans[-1] = (spans[-1][0], at, spans[-1][2])
        spans.append((at, end, leader))
    return spans


if __name__ == "__main__":
    main()
