"""Loss and other metrics of a run against epochs, time and dollars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.formatting import figure
from offload.report.events import MetricsReported
from offload.report.json_values import number
from offload.report.page.charts.chart import POINTS, Axis, Chart, ChartLine, time_axis, value_axis, values_of
from offload.report.page.records import Floats, Intervals
from offload.report.page.story import Story

AGAINST = ("epochs", "time", "dollars")


@dataclass(frozen=True, kw_only=True)
class Points:
    """The values of one metric, with the epochs, seconds and dollars (NaN: unknown) at which they were reported."""

    values: Floats
    epochs: Floats
    seconds: Floats
    usd: Floats

    def against(self, what: str) -> tuple[Floats, Floats]:
        """Places and values against ``epochs``, ``time`` or ``dollars``. Of values at one place, the last one counts: a run that was
        resumed reports parts of an epoch again."""
        places = {"epochs": self.epochs, "time": self.seconds, "dollars": self.usd}[what]
        known = np.isfinite(places) & np.isfinite(self.values)
        places, values = places[known], self.values[known]
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
        last = np.append(np.diff(places) > 0, True) if len(places) else np.zeros(0, dtype=bool)
        places, values = places[last], values[last]
        if len(places) > POINTS:
            chosen = np.unique(np.linspace(0, len(places) - 1, POINTS).astype(int))
            places, values = places[chosen], values[chosen]
        return places, values


def points_of(story: Story) -> dict[str, Points]:
    """The metrics of a run by name, from the user's reports; without any, from the intervals."""
    reports = [
        event
        for event in story.records.events
        if isinstance(event, MetricsReported) and isinstance(event.metrics, dict)
    ]
    if not reports:
        return _from_intervals(story)
    at = np.array([event.at for event in reports], dtype=np.float64)
    epochs = _epochs([number(event.epoch) for event in reports], [number(event.step) for event in reports])
    names = list(dict.fromkeys(str(name) for event in reports for name in event.metrics))
    points = {}
    for name in names:
        values = np.array([number(event.metrics.get(name)) for event in reports])
        if np.isfinite(values).any():
            points[name] = _points(story, values, epochs, at)
    return points


def charts_of(name: str, points: list[tuple[str, str, Points]], length_s: float, *, key: str) -> list[Chart]:
    """A metric of one or several runs (their names, roles and points) against everything that is known."""
    charts = []
    for what in AGAINST:
        lines = []
        for run, role, metric in points:
            places, values = metric.against(what)
            if len(places):
                lines.append(
                    ChartLine(name=run, role=role, x=values_of(places), y=values_of(values), dots=len(places) <= 60)
                )
        if not lines:
            continue
        charts.append(
            Chart(
                key=f"{key}-{what}",
                title=f"{name} against {what}",
                reading="",
                x=_axis(what, lines, length_s),
                y=value_axis(name, lines, zero=False, log=False),
                lines=tuple(lines),
            )
        )
    return charts


def last_value(points: Points) -> str:
    """The last value as text."""
    known = points.values[np.isfinite(points.values)]
    return figure(float(known[-1])) if len(known) else "not finite"


def _axis(what: str, lines: list[ChartLine], length_s: float) -> Axis:
    if what == "time":
        return time_axis(length_s)
    high = max((x for line in lines for x in line.x if x is not None), default=1.0)
    unit = "usd" if what == "dollars" else "count"
    return Axis(label=what, low=0.0, high=high if high > 0 else 1.0, unit=unit)


def _points(story: Story, values: Floats, epochs: Floats, at: Any) -> Points:
    seconds = story.clock.seconds(at)
    usd = story.spending.up_to(seconds) if story.spending is not None else np.full(len(values), np.nan)
    return Points(values=values, epochs=epochs, seconds=seconds, usd=usd)


def _from_intervals(story: Story) -> dict[str, Points]:
    intervals: Intervals = story.records.intervals
    epochs = _epochs(list(intervals["epoch"]), list(intervals["step"]))
    return {
        name: _points(story, values, epochs, intervals["at"])
        for name, values in intervals.metrics.items()
        if np.isfinite(values).any()
    }


def _epochs(epochs: list[float], steps: list[float]) -> Floats:
    """The epochs trained at each report: within an epoch, the share of its steps. The last report of an epoch counts as its end, unless
    the epoch before it had more steps."""
    trained = np.full(len(epochs), np.nan)
    last_of: dict[float, float] = {}
    for epoch, step in zip(epochs, steps, strict=True):
        if epoch == epoch and step == step:
            last_of[epoch] = max(last_of.get(epoch, 0.0), step)
    before, length = 0.0, 0.0
    begins: dict[float, tuple[float, float]] = {}
    for epoch in sorted(last_of):
        own = last_of[epoch] - before
        length = max(own, length if epoch == max(last_of) else own)
        begins[epoch] = (before, length or 1.0)
        before = last_of[epoch]
    for place, (epoch, step) in enumerate(zip(epochs, steps, strict=True)):
        if epoch in begins and step == step:
            start, length = begins[epoch]
            trained[place] = epoch + min(max((step - start) / length, 0.0), 1.0)
    return trained
