"""Draws the result of offload_vs_single as bars: what each row delivers of what its cores can do, per workload.

python benchmarks/plot_offload_vs_single.py result.json -o result.svg
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {"plain": "#9e9e9e", "dataloader": "#5b8ff9", "ray": "#f6bd16", "offload": "#2ca05a"}


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(result: Path, output: Path) -> None:
    """Draw RESULT, the JSON that offload_vs_single wrote."""
    document = json.loads(result.read_text())
    workloads = list(dict.fromkeys(row["workload"] for row in document["rows"]))
    if not workloads:
        raise click.ClickException(f"{result} has no rows to draw")
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(4.2 * len(workloads), 3.8), squeeze=False, constrained_layout=True
    )
    for axis, workload in zip(axes[0], workloads, strict=True):
        _draw(axis, workload, [row for row in document["rows"] if row["workload"] == workload])
    axes[0][0].set_ylabel("samples/s, and share of the ideal")
    machine, versions = document["machine"], document["versions"]
    figure.suptitle(
        f"{machine['cpu_model']}, one core per host · Ray {versions['ray']}, torch {versions['torch']} · "
        f"consumer: {document['accelerator']}",
        fontsize=9,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def _draw(axis: Any, workload: str, rows: list[dict[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    rates = [row["samples_per_s"] for row in rows]
    bars = axis.bar(names, rates, color=[COLOURS[name.split("-")[0]] for name in names])
    labels = [
        f"{row['samples_per_s']:,.0f}\n" + ("" if row["name"] == "plain" else f"{row['delivered_over_ideal']:.0%}")
        for row in rows
    ]
    axis.bar_label(bars, labels, fontsize=8)
    ideal = next(row["samples_per_s"] for row in rows if row["name"] == "plain")
    axis.axhline(ideal, color=COLOURS["plain"], linewidth=0.8, linestyle="--")
    axis.set_ylim(0, 1.22 * max([*rates, ideal]))
    axis.set_title(workload)
    axis.tick_params(axis="x", rotation=35, labelsize=8)
    plt.setp(axis.get_xticklabels(), ha="right")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
