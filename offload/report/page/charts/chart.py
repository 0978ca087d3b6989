"""Charts as values: lines, bands and marks over one axis each, before anyone draws them.

The page draws a chart as SVG, and ``--png`` with matplotlib: both show the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from offload.formatting import duration, figure, share, usd
from offload.report.json_values import LARGEST
from offload.report.page.records import Floats

POINTS = 240  # points of a line: more than the pixels of a phone, and half of those of a laptop
MOST_RATIO = 1e8  # range of a logarithmic axis: beyond it, a value next to 0 squeezes all others
APART = 8.0  # ratio of the largest to the smallest line from which on an axis is logarithmic
SPIKE = 30.0  # ratio of the largest value to the smallest line that has the same effect
FINGER = 0.065  # share of the axis that a finger covers on a phone
ROLES = ("measured", "input", "device", "stall", "other", "a", "b", "c", "d", "e", "f")
"""The colours of lines by their role, as the style sheet and the pictures name them."""

Values = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line, or a band if it has ``low`` and ``high``.

    Args:
        name: for the legend.
        role: its colour, one of ``ROLES``.
        x, y: its points; None in ``y`` breaks the line.
        low, high: the range around each point; empty: none.
        dash: whether it is dashed.
        steps: whether its value holds until the next point.
        filled: whether the band between ``low`` and ``high`` is the content, as in a stack, rather than a range.
        dots: whether each point is a dot.
    """

    name: str
    role: str
    x: Values
    y: Values
    low: Values = ()
    high: Values = ()
    dash: bool = False
    steps: bool = False
    filled: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at ``x``. ``kind``: ``decision``, ``fault`` or ``resumed``; ``words``: one text for each event."""

    x: float
    kind: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from ``low`` to ``high``. ``unit``: ``s`` (durations), ``share``, ``usd``, ``count`` (whole numbers) or none."""

    label: str
    low: float
    high: float
    unit: str = ""
    log: bool = False

    def place(self, value: float) -> float:
        """The place of a value along the axis: 0 at ``low``, 1 at ``high``."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, 1e-300)), math.log(low), math.log(high)
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Round values within the axis, with their texts."""
        if self.unit == "s":
            values = _multiples(self.low, self.high, _second_step(self.high - self.low, most))
        elif self.log:
            values = _decades(self.low, self.high, most)
        else:
            span = self.high - self.low
            step = max(_round_step(span, most, (1, 2, 5, 10)), 1.0) if self.unit == "count" else _round_step(span, most)
            values = _multiples(self.low, self.high, step)
        return [(value, self.text(value)) for value in values]

    def text(self, value: float | None) -> str:
        """A value in the axis's unit."""
        if value is None:
            return "–"
        if self.unit == "s":
            return "0" if value == 0 else duration(value)
        if self.unit == "share":
            return share(value)
        if self.unit == "usd":
            return "$0" if value == 0 else usd(value)
        return figure(value)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart.

    Args:
        key: its name in links and file names.
        title: what it shows.
        reading: what high and low mean, in a sentence or two.
        x, y: the axes.
        lines, marks: what is on it.
        tall: whether it is a main chart, twice as high as the others.
    """

    key: str
    title: str
    reading: str
    x: Axis
    y: Axis
    lines: tuple[ChartLine, ...]
    marks: tuple[Mark, ...] = ()
    tall: bool = False

    @property
    def summary(self) -> str:
        """The chart in one sentence, for those who cannot see it."""
        parts = []
        for line in self.lines:
            known = [value for value in line.y if value is not None]
            if known:
                parts.append(
                    f"{line.name} from {self.y.text(min(known))} to {self.y.text(max(known))}, at the end {self.y.text(known[-1])}"
                )
        return f"{self.title}. {self.y.label} over {self.x.label}: {'; '.join(parts) or 'no values'}."


def time_axis(length_s: float) -> Axis:
    """The seconds of a run."""
    return Axis(label="time of the run", low=0.0, high=max(length_s, 1e-3), unit="s")


def value_axis(
    label: str,
    lines: Sequence[ChartLine],
    *,
    unit: str = "",
    zero: bool = True,
    log: bool | None = None,
    least_high: float = 0.0,
) -> Axis:
    """An axis on which all lines are inside the frame. ``log``: None: if the lines are far apart; ``zero``: whether a linear one
    begins at 0."""
    known = [v for line in lines for values in (line.y, line.low, line.high) for v in values if v is not None]
    if not known:
        return Axis(label=label, low=0.0, high=1.0, unit=unit)
    middles = [
        float(np.median([v for v in line.y if v is not None])) for line in lines if any(v is not None for v in line.y)
    ]
    positive = [v for v in known if v > 0]
    if log is None:
        above = [middle for middle in middles if middle > 0]
        log = len(above) > 1 and (max(above) > APART * min(above) or max(positive) > SPIKE * min(above))
    if (
        log
        and len(positive) == len(known)
        and max(positive) <= MOST_RATIO * min(positive)
        and min(positive) > 1 / LARGEST
    ):
        return Axis(label=label, low=_below(min(positive)), high=_above(max(positive)), unit=unit, log=True)
    low, high = min(known), max(max(known), least_high)
    if zero and low >= 0:
        return Axis(label=label, low=0.0, high=(high or 1.0) * 1.08, unit=unit)
    margin = 0.08 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(label=label, low=low - margin, high=high + margin, unit=unit)


@dataclass(frozen=True)
class Bins:
    """Consecutive points, put together to at most ``POINTS`` by place on the x axis. A break in ``group`` breaks all lines."""

    which: Floats
    x: Values
    starts: tuple[int, ...]

    @staticmethod
    def of(x: Floats, group: Floats | None = None, points: int = POINTS) -> Bins:
        """Bins of equal width over ``x``, which must not fall."""
        if not len(x):
            return Bins(np.zeros(0), (), ())
        if len(x) <= points:
            places = np.arange(len(x), dtype=np.float64)
        else:
            span = float(x[-1] - x[0]) or 1.0
            places = np.minimum(np.floor((x - x[0]) / span * points), points - 1)
        if group is not None:
            places = places + np.asarray(group, dtype=np.float64) * (points + len(x))
        edges = np.flatnonzero(np.diff(places, prepend=-1.0))
        which = np.cumsum(np.diff(places, prepend=-1.0) != 0) - 1
        middle = [float(np.mean(part)) for part in np.split(x, edges[1:])]
        groups = np.zeros(len(edges)) if group is None else np.asarray(group)[edges]
        return Bins(which, tuple(middle), tuple(int(place) for place in np.flatnonzero(np.diff(groups) != 0) + 1))

    def line(self, name: str, role: str, values: ArrayLike, *, ranges: bool = True, **style: bool) -> ChartLine:
        """A line of the bins' means, with their least and greatest values as its range. It omits values that are not finite."""
        y = np.asarray(values, dtype=np.float64)
        known = np.isfinite(y)
        size = len(self.x)
        which = self.which[known].astype(int)
        counts = np.bincount(which, minlength=size)
        sums = np.bincount(which, weights=y[known], minlength=size)
        low, high = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(low, which, y[known])
        np.maximum.at(high, which, y[known])
        mean = np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)
        wide = ranges and bool((counts > 1).any())
        return ChartLine(
            name=name,
            role=role,
            x=self.broken(self.x),
            y=self.broken(values_of(mean)),
            low=self.broken(values_of(np.where(counts > 0, low, np.nan))) if wide else (),
            high=self.broken(values_of(np.where(counts > 0, high, np.nan))) if wide else (),
            **style,
        )

    def broken(self, values: Values) -> Values:
        """The values with a gap before each break. (The x of a gap is never drawn.)"""
        if not self.starts:
            return values
        spaced: list[float | None] = []
        for place, value in enumerate(values):
            if place in self.starts:
                spaced.append(None)
            spaced.append(value)
        return tuple(spaced)


def values_of(values: ArrayLike) -> Values:
    """An array as values, with None for those that are not finite."""
    return tuple(float(v) if math.isfinite(v) else None for v in np.asarray(values, dtype=np.float64))


def merged(marks: Sequence[Mark], axis: Axis, closest: float = FINGER) -> tuple[Mark, ...]:
    """Marks that stand at least ``closest`` of the axis apart, so that a finger hits one: those of a neighbourhood become one."""
    apart: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        if apart and axis.place(mark.x) - axis.place(apart[-1].x) < closest:
            last = apart[-1]
            kind = "fault" if "fault" in (last.kind, mark.kind) else last.kind
            apart[-1] = Mark(x=last.x, kind=kind, words=(*last.words, *mark.words))
        else:
            apart.append(mark)
    return tuple(apart)


def _round_step(span: float, most: int, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    rough = span / max(most - 1, 1)
    if not rough > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in factors if power * factor >= rough * (1 - 1e-9))


def _second_step(span: float, most: int) -> float:
    rough = span / max(most - 1, 1)
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    if rough < 1:
        return _round_step(span, most)
    return next((step for step in steps if step >= rough), 86400 * _round_step(span / 86400, most))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, min(last, first + 20) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [
            f * 10.0**p for p in range(first, last + 1) for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001
        ]
        if len(values) <= most + 1:
            return values
    return values[:: math.ceil(len(values) / most)]


def _below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(factor * power for factor in (0.5, 1, 2, 5) if factor * power <= value * 0.9)


def _above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= value * 1.1)
