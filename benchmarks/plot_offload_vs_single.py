"""Draws results of offload_vs_single as bars: the rate of each row, and the rate that its cores can reach, per workload.

python benchmarks/plot_offload_vs_single.py benchmarks/results/offload_vs_single-{blur,jpeg}.json -o result.png
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {
    "plain": "#9e9e9e", "dataloader": "#5b8ff9", "ray": "#f6bd16", "offload": "#2ca05a", "loader": "#8fd3a8", "dataset": "#1b6b3a",
}  # fmt: skip


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(results: tuple[Path, ...], output: Path) -> None:
    """Draw RESULTS, the JSON files that offload_vs_single wrote."""
    documents = [json.loads(result.read_text()) for result in results]
    rows = [row for document in documents for row in document["rows"]]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    if not workloads:
        raise click.ClickException(f"{', '.join(map(str, results))}: no rows to draw")
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(4.2 * len(workloads), 3.8), squeeze=False, constrained_layout=True
    )
    for axis, workload in zip(axes[0], workloads, strict=True):
        _draw(axis, workload, [row for row in rows if row["workload"] == workload])
    axes[0][0].set_ylabel("samples/s")
    machine, versions = documents[0]["machine"], documents[0]["versions"]
    consumers = ", ".join(dict.fromkeys(document["accelerator"] for document in documents))
    figure.suptitle(
        f"samples/s, and % of a plain loop's rate on the row's cores (the black line) · consumer: {consumers}\n"
        f"emulated hosts of one core each, {machine['cpu_model']} · Ray {versions['ray']}, torch {versions['torch']}",
        fontsize=9,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def _draw(axis: Any, workload: str, rows: list[dict[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    rates = [row["samples_per_s"] for row in rows]
    ideals = [row["samples_per_s"] / row["delivered_over_ideal"] for row in rows]
    axis.bar(names, rates, color=[COLOURS[name.split("-")[0]] for name in names])
    places = range(len(rows))
    axis.hlines(ideals, [i - 0.45 for i in places], [i + 0.45 for i in places], color="black", linewidth=1)
    for place, row, top in zip(places, rows, map(max, rates, ideals), strict=True):
        text = f"{row['samples_per_s']:,.0f}\n{row['delivered_over_ideal']:.0%}"
        axis.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axis.set_ylim(0, 1.2 * max(*rates, *ideals))
    axis.set_title(workload)
    axis.tick_params(axis="x", rotation=35, labelsize=8)
    plt.setp(axis.get_xticklabels(), ha="right")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
