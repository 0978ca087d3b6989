"""Draws a result of adaptation.py: time and dollars to the accuracy, by policy.

python benchmarks/plot_adaptation.py benchmarks/results/adaptation.json -o benchmarks/results/adaptation.png
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {"adaptive": "#2ca05a", "joint": "#2ca05a", "without input term": "#f6bd16"}


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(result: Path, output: Path) -> None:
    """Draw RESULT, the JSON file that adaptation wrote."""
    document = json.loads(result.read_text())
    rows = [each for each in document["summary"] if each["case"] != "midway"]
    groups = sorted({(each["case"], each["model"]) for each in rows})
    figure, axes = plt.subplots(
        2, len(groups), figsize=(2.6 * len(groups), 5.2), constrained_layout=True, squeeze=False
    )
    for column, (case, model) in enumerate(groups):
        mine = [each for each in rows if (each["case"], each["model"]) == (case, model)]
        for axis, value, unit in zip(
            axes[:, column], ("time_to_accuracy_s", "usd"), ("s to accuracy", "$ to accuracy"), strict=True
        ):
            _bars(axis, mine, value, unit)
        axes[0, column].set_title(f"{case}, {model}", fontsize=9)
    figure.suptitle(f"{document['accelerator']}; medians over seeds; no bar: the accuracy was not reached", fontsize=9)
    figure.savefig(output, dpi=150)


def _bars(axis: Any, rows: list[dict[str, Any]], value: str, unit: str) -> None:
    for at, row in enumerate(rows):
        axis.bar(at, row[value] or 0.0, color=COLOURS.get(row["policy"], "#9aa0a6"))
    axis.set_xticks(range(len(rows)), [row["policy"] for row in rows], rotation=35, ha="right", fontsize=7)
    axis.set_ylabel(unit, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
