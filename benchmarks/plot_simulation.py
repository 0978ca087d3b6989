"""Draws a result of simulation.py: dollars and hours against scale by policy, and the distribution of regret.

python benchmarks/plot_simulation.py benchmarks/results/simulation.json -o benchmarks/results/simulation.png
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

COLOURS = {
    "single, small": "#9aa0a6",
    "single, large": "#5f6368",
    "4 cores a GPU": "#c9b458",
    "16 cores a GPU": "#a67c00",
    "AdaptDL": "#f6bd16",
    "FastFlow": "#e8684a",
    "tf.data service": "#6dc8ec",
    "Cachew": "#9270ca",
    "Pecan": "#5b8ff9",
    "offload plan": "#2ca05a",
    "optimum": "#000000",
}


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(result: Path, output: Path) -> None:
    """Draw RESULT, the JSON file that simulation wrote. It holds the parts scale and regret."""
    document = json.loads(result.read_text(encoding="utf-8"))
    missing = [part for part in ("scale", "regret") if part not in document]
    if missing:
        raise click.BadParameter(f"{result} has no part {' and '.join(missing)}. Run simulation.py without --part.")
    rows = document["scale"]["rows"]
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    figure, axes = plt.subplots(2, len(jobs) + 1, figsize=(4.2 * (len(jobs) + 1), 7.2), constrained_layout=True)
    for column, job in enumerate(jobs):
        for axis, value, unit in zip(
            axes[:, column], ("usd", "hours"), ("$ per million samples", "hours"), strict=True
        ):
            _lines(axis, [row for row in rows if row["job"] == job], value)
            axis.set_ylabel(unit)
        axes[0, column].set_title(job)
        axes[1, column].set_xlabel("GPUs")
    for axis, name in zip(axes[:, -1], ("with the hub's limit", "without it"), strict=True):
        _regret(axis, document["regret"].get(name, {"rows": []})["rows"])
        axis.set_title(f"regret, {name}", fontsize=9)
    axes[1, -1].set_xlabel("% above the best of all")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle("Simulated; spot CPU nodes; a line's samples are 2 million a GPU", fontsize=9)
    figure.savefig(output, dpi=110)


def _lines(axis: Any, rows: list[dict[str, Any]], value: str) -> None:
    for policy, colour in COLOURS.items():
        mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["gpus"])
        gpus = [row["gpus"] for row in mine]
        values = [row[value] / (2 * row["gpus"]) if value == "usd" else row[value] for row in mine]
        style = {"linestyle": "--", "zorder": 3} if policy == "optimum" else {}
        axis.plot(
            gpus, values, color=colour, label=policy, linewidth=2.2 if policy.startswith("offload") else 1.1, **style
        )
    axis.set(xscale="log", yscale="log")
    axis.set_xticks([8, 32, 128, 512, 1024], ["8", "32", "128", "512", "1,024"])
    axis.spines[["top", "right"]].set_visible(False)


def _regret(axis: Any, rows: list[dict[str, Any]]) -> None:
    for policy, colour in COLOURS.items():
        if policy == "optimum":
            continue
        values = np.sort([100 * row["regret"][policy] for row in rows] or [np.nan])
        shares = np.arange(1, len(values) + 1) / len(values)
        axis.plot(
            np.maximum(values, 0.01), shares, color=colour, linewidth=2.2 if policy.startswith("offload") else 1.1
        )
    axis.axvline(10, color="#bbbbbb", linestyle=":", zorder=0)
    axis.set(xscale="log", xlim=(0.01, 2000), ylim=(0, 1.01), ylabel="share of random jobs")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
