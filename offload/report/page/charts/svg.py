"""The drawing of a chart on the page: paths in a square of 1000 × 1000, which the page stretches, and the places of its labels.

Text and marks are HTML at shares of the frame, so that they keep their size on any width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offload.report.page.charts.chart import Axis, Chart, ChartLine, Mark

SIDE = 1000
MOST_TABLE_ROWS = 25


@dataclass(frozen=True, kw_only=True)
class DrawnLine:
    """A line's paths: the line itself, its band (a range, or the content of a stack) and its dots. Empty: none."""

    line: ChartLine
    path: str
    band: str
    dots: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A chart ready for the template. Places are percentages of the frame, from the left and from the top."""

    chart: Chart
    drawn: tuple[DrawnLine, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    marks: tuple[tuple[float, Mark], ...]
    readout: dict[str, Any]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plot(chart: Chart) -> Plot:
    """Draw a chart."""
    x_ticks = [(100 * chart.x.place(value), label) for value, label in chart.x.ticks(5)]
    head, rows = _table(chart)
    return Plot(
        chart=chart,
        drawn=tuple(_drawn(line, chart) for line in chart.lines),
        x_ticks=tuple((place, label) for place, label in x_ticks if place <= 100),
        y_ticks=tuple((100 - 100 * chart.y.place(value), label) for value, label in chart.y.ticks()),
        marks=tuple((100 * chart.x.place(mark.x), mark) for mark in chart.marks),
        readout=_readout(chart),
        head=head,
        rows=rows,
    )


def _drawn(line: ChartLine, chart: Chart) -> DrawnLine:
    band = "".join(_area(part, chart) for part in _parts(line, line.low, line.high)) if line.low else ""
    path = "" if line.filled else "".join(_way(part, chart, steps=line.steps) for part in _parts(line, line.y))
    dots = ""
    if line.dots and not line.filled:
        dots = "".join(f"M{_x(x, chart.x)} {_y(y, chart.y)}h0" for part in _parts(line, line.y) for x, y in part)
    return DrawnLine(line=line, path=path, band=band, dots=dots)


def _parts(line: ChartLine, *columns: Sequence[float | None]) -> Iterator[list[tuple[float, ...]]]:
    """The unbroken parts of a line, as points."""
    part: list[tuple[float, ...]] = []
    for x, *values in zip(line.x, *columns, strict=True):
        if x is None or any(value is None for value in values):
            if part:
                yield part
            part = []
        else:
            part.append((x, *[value for value in values if value is not None]))
    if part:
        yield part


def _way(points: Sequence[tuple[float, ...]], chart: Chart, *, steps: bool) -> str:
    places = [(_x(x, chart.x), _y(y, chart.y)) for x, y in points]
    if len(places) == 1:
        return f"M{places[0][0]} {places[0][1]}h0"  # a round end makes it a dot
    way = [f"M{places[0][0]} {places[0][1]}"]
    for (_, before), (x, y) in pairwise(places):
        if steps:
            way.append(f"H{x}" + (f"V{y}" if y != before else ""))
        else:
            way.append(f"L{x} {y}")
    return "".join(way)


def _area(points: Sequence[tuple[float, ...]], chart: Chart) -> str:
    up = [f"{_x(x, chart.x)} {_y(high, chart.y)}" for x, _, high in points]
    down = [f"{_x(x, chart.x)} {_y(low, chart.y)}" for x, low, _ in reversed(points)]
    return f"M{'L'.join(up)}L{'L'.join(down)}Z"


def _x(value: float, axis: Axis) -> str:
    return f"{SIDE * axis.place(value):.1f}".removesuffix(".0")


def _y(value: float, axis: Axis) -> str:
    return f"{SIDE * (1 - axis.place(value)):.1f}".removesuffix(".0")


def _readout(chart: Chart) -> dict[str, Any]:
    """The values under the pointer: the places and texts of each x grid, and each line's texts with the number of its grid."""
    grids: list[tuple[float | None, ...]] = []
    lines = []
    for line in chart.lines:
        if line.x not in grids:
            grids.append(line.x)
        lines.append(
            {
                "name": line.name,
                "role": line.role,
                "grid": grids.index(line.x),
                "y": ["" if value is None else chart.y.text(value) for value in line.y],
                "at": [
                    None if v is None else round(chart.y.place(v), 4) for v in (line.high if line.filled else line.y)
                ],
            }
        )
    return {
        "x": chart.x.label,
        "grids": [
            {
                "at": [None if x is None else round(chart.x.place(x), 4) for x in grid],
                "text": ["" if x is None else chart.x.text(x) for x in grid],
            }
            for grid in grids
        ],
        "lines": lines,
    }


def _table(chart: Chart) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The chart as a table of at most ``MOST_TABLE_ROWS`` rows, evenly chosen."""
    by_x: dict[float, dict[int, float]] = {}
    for number, line in enumerate(chart.lines):
        for x, y in zip(line.x, line.y, strict=True):
            if x is not None and y is not None:
                by_x.setdefault(x, {})[number] = y
    places = sorted(by_x)
    if len(places) > MOST_TABLE_ROWS:
        places = [places[round(n * (len(places) - 1) / (MOST_TABLE_ROWS - 1))] for n in range(MOST_TABLE_ROWS)]
    rows = [
        (chart.x.text(x), *(chart.y.text(by_x[x][n]) if n in by_x[x] else "" for n in range(len(chart.lines))))
        for x in places
    ]
    return (chart.x.label, *(line.name for line in chart.lines)), tuple(rows)
