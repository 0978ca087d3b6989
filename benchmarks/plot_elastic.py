"""Draws a result of elastic.py: seconds without steps of a resize, compared with Ray Train's own.

python benchmarks/plot_elastic.py benchmarks/results/elastic.json -o benchmarks/results/elastic.png
"""

import json
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(result: Path, output: Path) -> None:
    """Draw RESULT, the JSON file that elastic wrote."""
    document = json.loads(result.read_text())
    resize = document["resize"]
    figure, axis = plt.subplots(figsize=(6.4, 2.4), constrained_layout=True)
    for row, (name, label, colour) in enumerate(
        (("ray_train", "Ray Train", "#9aa0a6"), ("offload", "offload", "#2ca05a"))
    ):
        axis.barh(row, resize[f"{name}_s"], color=colour)
        axis.scatter(resize[f"{name}_each_s"], [row] * len(resize[f"{name}_each_s"]), color="black", s=12, zorder=3)
        axis.text(0, row, f" {label} {resize[f'{name}_s']:.1f} s", va="center", color="white", fontsize=9)
    axis.set(yticks=[], xlabel="seconds without a step while one worker becomes two")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(
        f"{document['schedules']} rehearsed and {document['real_process_schedules']} real schedules: {document['lost']} samples "
        f"lost, {document['repeated']} repeated, {document['hangs']} hangs",
        fontsize=9,
    )
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    main()
