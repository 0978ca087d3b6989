"""Draws a result of prediction.py: predicted against measured samples/s, with AdaptDL's prediction.

python benchmarks/plot_prediction.py benchmarks/results/prediction.json -o benchmarks/results/prediction.png
"""

import json
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {"blur": "#5b8ff9", "blur-uint8": "#2ca05a", "jpeg": "#f6bd16"}


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("-o", "output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.png or *.svg")
def main(result: Path, output: Path) -> None:
    """Draw RESULT, the JSON file that prediction wrote."""
    document = json.loads(result.read_text())
    figure, axis = plt.subplots(figsize=(6.4, 5.4), constrained_layout=True)
    every = [value for case in document["cases"] for value in (case["measured"], case["predicted"], case["adaptdl"])]
    ends = [0.8 * min(every), 1.25 * max(every)]
    axis.plot(ends, ends, color="black", lw=1)
    axis.fill_between(ends, [0.88 * e for e in ends], [1.12 * e for e in ends], color="black", alpha=0.08, lw=0)
    for workload, colour in COLOURS.items():
        cases = [case for case in document["cases"] if case["workload"] == workload]
        if not cases:
            continue
        measured = [case["measured"] for case in cases]
        axis.scatter(
            measured, [c["predicted"] for c in cases], color=colour, label=f"{workload}: joint model", zorder=3
        )
        axis.scatter(
            measured, [c["adaptdl"] for c in cases], color=colour, marker="x", label=f"{workload}: AdaptDL's model"
        )
    axis.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured samples/s", ylabel="predicted samples/s"
    )
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    error = document["error"]
    axis.set_title(
        f"predicted before each run · {document['accelerator']}, emulated hosts, {document['machine']['cpu_model']}\n"
        f"error: median {error['median']:.1%}, worst {error['worst']:.1%}; grey: ± 12 %",
        fontsize=9,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
