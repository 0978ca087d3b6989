"""Several runs side by side, and the speed-up of each over the first with its confidence interval.

The method: a run's intervals, without the first tenth, form up to ten batches of consecutive intervals. (Neighbouring intervals resemble
each other; the means of long batches hardly do.) The logarithms of the batches' rates go into Welch's t interval for the difference of two
means, and its ends back through the exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload.formatting import duration, figure, share, usd
from offload.report.page.measured import samples_of, usable, workers_of
from offload.report.page.records import Floats, Intervals
from offload.report.page.story import Story
from offload.report.page.tables import Table, speed_up_words

CONFIDENCE = 0.95
BATCHES = 10
LEAST_BATCHES = 3
WARM_UP = 0.1  # share of the intervals at the start, in which caches and queues fill
METHOD = (
    "Ranges are 95% confidence intervals: Welch's t on the logarithms of the rates of up to ten batches of consecutive intervals, "
    "without the first tenth of each run. They cover the noise within the runs, not what differs from one day or machine to the next."
)


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """A ratio of two rates, with its confidence interval; both ends are None with too few intervals."""

    ratio: float
    low: float | None
    high: float | None


def batch_rates(intervals: Intervals) -> Floats:
    """The rates of up to ``BATCHES`` batches of consecutive intervals; empty with too few intervals."""
    where = np.flatnonzero(usable(intervals))
    where = where[math.ceil(WARM_UP * len(where)) :] if len(where) > LEAST_BATCHES else where
    batches = min(BATCHES, len(where) // 2 if len(where) >= 2 * LEAST_BATCHES else len(where))
    if batches < LEAST_BATCHES:
        return np.zeros(0)
    samples = samples_of(intervals)
    seconds = intervals["step_time_s"] / workers_of(intervals)
    rates = [float(np.sum(samples[part]) / np.sum(seconds[part])) for part in np.array_split(where, batches)]
    return np.asarray(rates)


def speed_up(first: Story, other: Story) -> SpeedUp | None:
    """The rate of ``other`` over that of ``first``; None if one of them trained nothing."""
    from scipy import stats  # takes long to import, and a page of one run has no use for it

    if first.whole is None or other.whole is None:
        return None
    ratio = other.whole.samples_per_s / first.whole.samples_per_s
    a, b = (np.log(batch_rates(story.records.intervals)) for story in (first, other))
    if not (len(a) and len(b)):
        return SpeedUp(ratio=ratio, low=None, high=None)
    # Welch's interval, since two runs need not vary equally.
    va, vb = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    middle = float(np.mean(b) - np.mean(a))
    if va + vb <= 0:
        return SpeedUp(ratio=ratio, low=math.exp(middle), high=math.exp(middle))
    # The Welch–Satterthwaite equation.
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(va + vb)
    # The ratio comes from the same batches as its interval. From all intervals, it could lie outside.
    return SpeedUp(ratio=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def comparison(stories: Sequence[Story], names: Sequence[str]) -> Table:
    """The table of several runs. Price efficiency is samples per dollar, relative to the first run that has a price."""
    per_dollar = [_per_dollar(story) for story in stories]
    base = next((efficiency for efficiency in per_dollar if efficiency is not None), None)
    rows = []
    for story, name, efficiency in zip(stories, names, per_dollar, strict=True):
        whole = story.whole
        rows.append(
            (
                name,
                story.status,
                figure(whole.samples_per_s) if whole else "–",
                duration(whole.step_s) if whole else "–",
                share(whole.stall) if whole else "–",
                share(whole.busy) if whole else "–",
                usd(story.mean_usd_per_hour),
                usd(story.mean_usd_per_million),
                _efficiency(efficiency, base),
                _speed_up_words(stories[0], story),
            )
        )
    return Table(
        head=(
            "run", "status", "samples/s", "step time", "stall", "accelerators busy", "$ per hour", "$ per million samples",
            "price efficiency", "speed-up over the first (95%)",
        ),
        rows=tuple(rows),
        numeric=tuple(range(2, 10)),
        note=METHOD,
    )  # fmt: skip


def names_of(stories: Sequence[Story]) -> list[str]:
    """Return a name for each run: the last part of its path, and enough parts before it to be unique."""
    paths = [story.records.path for story in stories]
    names = [path.name or str(path) for path in paths]
    for place, path in enumerate(paths):
        parts = 1
        while sum(
            "/".join(other.parts[-parts:]) == "/".join(path.parts[-parts:]) for other in paths
        ) > 1 and parts < len(path.parts):
            parts += 1
        if parts > 1:
            names[place] = "/".join(path.parts[-parts:])
    return names


def _efficiency(value: float | None, base: float | None) -> str:
    if value is None or base is None:
        return "–"
    return "reference" if value is base else f"{100 * (value / base - 1):+.0f}%".replace("-", "−")


def _per_dollar(story: Story) -> float | None:
    return 1e6 / story.mean_usd_per_million if story.mean_usd_per_million else None


def _speed_up_words(first: Story, other: Story) -> str:
    if first is other:
        return "reference"
    faster = speed_up(first, other)
    if faster is None:
        return "–"
    if faster.low is None or faster.high is None:
        return f"{faster.ratio:.2f}× (too few intervals for a range)"
    return speed_up_words(faster.ratio, faster.low, faster.high)
