"""Write the picture of docs/live.md of the Grafana dashboard.

It is no screenshot of Grafana. This program draws each panel from the answers of a real Prometheus to the panel's own expressions, while
that Prometheus scrapes a real run (tests/programs/live_run.py).

python -m tests.programs.dashboard_picture
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tests.helpers import ROOT
from tests.prometheus import Prometheus, dashboard, free_port, scraping

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
EPOCHS = 6
COLUMNS, ROWS = 24, 24  # of Grafana's grid
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
MARKS = {"decisions": "#9467BD", "checkpoints": "#B0B0B0"}


def main() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        arguments = ["tests/programs/live_run.py", "--run-dir", str(folder / "vit"), "--", str(port), str(EPOCHS)]
        began = time.time()
        with scraping(f"127.0.0.1:{port}", folder) as prometheus:
            subprocess.run([sys.executable, "-m", "offload", "run", *arguments], cwd=ROOT, check=True)
            _drawn(prometheus, began, time.time()).savefig(PICTURE, dpi=80)


def _drawn(prometheus: Prometheus, began: float, ended: float) -> Figure:
    figure = Figure(figsize=(15, 10), layout="constrained")
    figure.supxlabel(
        "seconds since the start of the run; dashed: checkpoints (grey) and decisions (violet)", fontsize=10
    )
    grid = figure.add_gridspec(ROWS, COLUMNS)
    found = dashboard()
    marks = {
        each["name"]: _since(prometheus.series(each["expr"], began, ended)) for each in found["annotations"]["list"]
    }
    for panel in found["panels"]:
        at = panel["gridPos"]
        axes = figure.add_subplot(grid[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]])
        _draw(axes, panel, prometheus, began, ended)
        for name, times in marks.items():
            for when in times:
                axes.axvline(when - began, color=MARKS[name], linestyle="--", linewidth=1)
    return figure


def _draw(axes: Any, panel: dict[str, Any], prometheus: Prometheus, began: float, ended: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    style = "steps-post" if defaults["custom"]["lineInterpolation"] == "stepAfter" else "default"
    for target, color in zip(panel["targets"], COLORS, strict=False):
        for labels, values in prometheus.series(target["expr"], began, ended):
            name = target["legendFormat"].replace("{{run}}", labels["run"])
            at, value = zip(*values, strict=True)
            axes.plot([each - began for each in at], value, color=color, drawstyle=style, label=name)
    axes.set_title(panel["title"], loc="left", fontsize=11)
    axes.set_ylim(bottom=defaults["min"], top=defaults.get("max"))
    axes.set_xlim(0, ended - began)
    if defaults["unit"] == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)


def _since(series: list[tuple[dict[str, str], list[Any]]]) -> list[float]:
    """The times at which an annotation begins."""
    times = [at for _, values in series for at, _ in values]
    return [at for before, at in zip([0.0, *times], times, strict=False) if at - before > 1.5]


if __name__ == "__main__":
    main()
