"""``--png`` of ``offload report``: every chart of the page as a picture of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from offload.report.page.charts.chart import Axis, Chart, ChartLine
from offload.report.page.page_view import PageView

COLORS = {
    "measured": "#17181c", "input": "#d55e00", "device": "#0072b2", "stall": "#d55e00", "other": "#9aa0ac", "a": "#009e73",
    "b": "#e69f00", "c": "#cc79a7", "d": "#56b4e9", "e": "#8f8400", "f": "#6b4fa0",
}  # fmt: skip
MARKS = {"decision": "#0072b2", "fault": "#d55e00", "resumed": "#9aa0ac"}
DPI = 110


def draw_page(page: PageView, folder: Path) -> list[Path]:
    """Write the charts into a folder, as ``throughput.png`` and so on. With several runs, ``all-throughput.png`` shows all of them, and
    ``1-throughput.png`` the first.

    Raises OSError if the folder or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, chart in _charts(page):
        path = folder / f"{name}.png"
        draw_chart(chart, path)
        written.append(path)
    return written


def _charts(page: PageView) -> Iterator[tuple[str, Chart]]:
    for chart in (*page.together, *(chart for metric in page.metrics for chart in metric.charts)):
        yield chart.key, chart
    for number, run in enumerate(page.runs, 1):
        for chart in run.charts:
            yield (chart.key if len(page.runs) == 1 else f"{number}-{chart.key}"), chart


def draw_chart(chart: Chart, file: Path | BinaryIO) -> None:
    """Write one chart as a PNG. Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2 if chart.tall else 3.0), layout="constrained")
    axes = figure.subplots()
    for line in chart.lines:
        _draw_line(axes, line)
    for mark in chart.marks:
        axes.axvline(mark.x, color=MARKS[mark.kind], lw=0.8, ls=":")
    _scale(axes, "x", chart.x)
    _scale(axes, "y", chart.y)
    axes.set_title(_plain(chart.title), loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="y", color="#dfe1e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.lines) > 1:
        handles = [_handle(line) for line in chart.lines]
        figure.legend(
            handles,
            [_plain(line.name) for line in chart.lines],
            fontsize=8,
            frameon=False,
            ncols=4,
            loc="outside lower left",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # a metric's name: a box stands for the letter
        figure.savefig(file, dpi=DPI, format="png")


def _handle(line: ChartLine) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=COLORS[line.role], lw=6 if line.filled else 1.6, ls="--" if line.dash else "-")


def _draw_line(axes: Any, line: ChartLine) -> None:
    color = COLORS[line.role]
    x = [math.nan if value is None else value for value in line.x]
    y = [math.nan if value is None else value for value in line.y]
    if line.low:
        low, high = ([math.nan if value is None else value for value in values] for values in (line.low, line.high))
        axes.fill_between(x, low, high, color=color, alpha=1.0 if line.filled else 0.18, lw=0)
    if not line.filled:
        style = {"ls": "--" if line.dash else "-", "marker": "o" if line.dots else "", "ms": 3}
        axes.plot(x, y, color=color, lw=1.6, drawstyle="steps-post" if line.steps else "default", **style)


def _scale(axes: Any, side: str, axis: Axis) -> None:
    if axis.log:
        getattr(axes, f"set_{side}scale")("log")
    getattr(axes, f"set_{side}lim")(axis.low, axis.high)
    places, labels = zip(*axis.ticks(), strict=True) if axis.ticks() else ((), ())
    getattr(axes, f"set_{side}ticks")(list(places), [_plain(label) for label in labels])
    if axis.log:
        getattr(axes, f"{side}axis").minorticks_off()
    getattr(axes, f"set_{side}label")(_plain(axis.label))


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: a pair of dollars would begin a formula."""
    return text.replace("$", r"\$")
