"""The page as one value: everything that it shows of one or several runs, ready to render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from offload.model.catalog import Catalog
from offload.report.page.chart import POINTS, Chart, Line, time_axis, value_axis
from offload.report.page.compare import comparison, names_of, speed_up
from offload.report.page.measured import PARTS, stalls
from offload.report.page.metric_charts import charts_of, last_value, points_of
from offload.report.page.numbers import count, duration, figure, moment, share, usd
from offload.report.page.records import Records, text
from offload.report.page.run_charts import PART_ROLES, bins_of, busy, cost, sizes, step_parts, throughput
from offload.report.page.story import Story
from offload.report.page.tables import (
    MOST_RAW,
    Comparison,
    Lane,
    Table,
    checkpoints,
    comparisons,
    faults,
    lanes,
    setup,
    skipped,
)  # fmt: skip
from offload.report.page.verdict import against_alone, bottleneck, money_missing, what_next
from offload.report.page.words import GROUPS

MOST_METRICS = 24
SHOWN_METRICS = 4  # the rest is behind a fold
MOST_EVENTS = 60  # of a group; the raw ones follow
RUN_ROLES = ("measured", "input", "device", "a", "b", "c", "d", "e", "f", "other")


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number in large type, with its name and what it means."""

    name: str
    value: str
    about: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a step: its share of the step time and its mean duration."""

    name: str
    role: str
    share: float
    words: str


@dataclass(frozen=True, kw_only=True)
class EventGroup:
    """The events about one thing: (time, words) each. ``left_out``: how many more there are."""

    title: str
    rows: tuple[tuple[str, str], ...]
    left_out: int


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric's charts, and its last value."""

    name: str
    last: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What the page shows of one run. ``key`` makes its ids unique on the page."""

    key: str
    name: str
    status: str
    error: str
    when: str
    verdict: str
    following: str
    alone: str
    tiles: tuple[Tile, ...]
    throughput: Chart | None
    busy: Chart | None
    parts: tuple[Part, ...]
    step: Chart | None
    sizes: tuple[Chart, ...]
    comparisons: tuple[Comparison, ...]
    lanes: tuple[Lane, ...]
    lanes_note: str
    metrics: tuple[Metric, ...]
    cost: Chart | None
    cost_note: str
    checkpoints: Table | None
    faults: Table | None
    skipped: Table | None
    events: tuple[EventGroup, ...]
    raw: tuple[str, ...]
    raw_left_out: int
    setup: Table
    notes: tuple[str, ...]

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All charts of the run."""
        own = (self.throughput, self.busy, self.step, *self.sizes, self.cost)
        return (*(chart for chart in own if chart is not None), *(chart for m in self.metrics for chart in m.charts))


@dataclass(frozen=True, kw_only=True)
class PageView:
    """The page. ``comparison`` and the charts over all runs are empty for a single run."""

    title: str
    runs: tuple[RunView, ...]
    comparison: Table | None
    together: tuple[Chart, ...]
    metrics: tuple[Metric, ...]


def page_of(records: Sequence[Records], catalog: Catalog, given: Mapping[str, float]) -> PageView:
    """The page of these runs. ``given``: the user's prices, see :class:`offload.report.page.money.Prices`."""
    stories = [Story(each, catalog, given) for each in records]
    names = names_of(stories)
    points = POINTS if len(stories) < 4 else POINTS // 2
    runs = tuple(
        run_view(story, name, key=f"r{place}", points=points)
        for place, (story, name) in enumerate(zip(stories, names, strict=True))
    )
    if len(stories) == 1:
        return PageView(title=names[0], runs=runs, comparison=None, together=(), metrics=())
    return PageView(
        title=f"{len(stories)} runs: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}",
        runs=runs,
        comparison=comparison(stories, names),
        together=tuple(_together(stories, names)),
        metrics=tuple(_metrics(stories, names, key="all")),
    )


def run_view(story: Story, name: str, *, key: str, points: int = POINTS) -> RunView:
    """What the page shows of one run."""
    steps = story.whole is not None
    bins = bins_of(story, points)
    events = story.records.events
    raw = [*events[: MOST_RAW // 2], *events[-MOST_RAW // 2 :]] if len(events) > MOST_RAW else events
    more_lanes = len(story.nodes) - len(lanes(story))
    return RunView(
        key=key,
        name=name,
        status=story.status,
        error=text(_error(story)),
        when=_when(story),
        verdict=bottleneck(story),
        following=what_next(story) if steps else "",
        alone=against_alone(story) if steps else "",
        tiles=_tiles(story),
        throughput=throughput(story, bins) if steps else None,
        busy=busy(story, bins) if steps else None,
        parts=_parts(story),
        step=step_parts(story, bins) if steps else None,
        sizes=tuple(sizes(story, bins)) if steps else (),
        comparisons=comparisons(story),
        lanes=lanes(story),
        lanes_note=f"{count(more_lanes, 'more node')} came later." if more_lanes else "",
        metrics=tuple(_metrics([story], [name], key="metric")),
        cost=cost(story),
        cost_note=_cost_note(story),
        checkpoints=checkpoints(story),
        faults=faults(story),
        skipped=skipped(story),
        events=_event_groups(story),
        raw=tuple(text(json.dumps(event, ensure_ascii=False), 1200) for event in raw),
        raw_left_out=len(events) - len(raw),
        setup=setup(story),
        notes=story.records.notes,
    )


def document_of(
    page: PageView, records: Sequence[Records], catalog: Catalog, given: Mapping[str, float]
) -> dict[str, Any]:
    """The page's numbers for other programs, without the charts."""
    stories = [Story(each, catalog, given) for each in records]
    runs = []
    for story, view in zip(stories, page.runs, strict=True):
        whole = story.whole
        faster = speed_up(stories[0], story) if story is not stories[0] else None
        runs.append(
            {
                "name": view.name,
                "run_dir": str(story.records.path),
                "status": view.status,
                "verdict": view.verdict,
                "next": view.following,
                "alone": view.alone,
                "samples": story.samples,
                "samples_per_s": whole.samples_per_s if whole else None,
                "step_time_s": whole.step_s if whole else None,
                "stall": whole.stall if whole else None,
                "busy": whole.busy if whole else None,
                "usd_per_hour": story.mean_usd_per_hour,
                "usd_per_million_samples": story.mean_usd_per_million,
                "usd": story.usd,
                "usd_at_end": story.usd_at_end,
                "speed_up": None if faster is None else {"ratio": faster.ratio, "low": faster.low, "high": faster.high},
                "notes": list(view.notes),
            }
        )
    return {"schema": "offload.report/1", "runs": runs}


def _tiles(story: Story) -> tuple[Tile, ...]:
    tiles = []
    whole = story.whole
    if whole is not None:
        tiles += [
            Tile(name="throughput", value=figure(whole.samples_per_s), about="samples/s while the workers step"),
            Tile(name="stall", value=share(whole.stall), about="of the step time waits for data"),
            Tile(
                name=f"{story.device}s busy", value=share(whole.busy), about="of the step time computes or synchronises"
            ),
        ]
    if story.usd_per_million is not None:
        tiles.append(
            Tile(
                name="a million samples",
                value=usd(story.usd_per_million),
                about=f"at {usd(story.usd_per_hour)} an hour",
            )
        )
    if story.usd is not None:
        tiles.append(
            Tile(
                name="cost so far" if story.status != "finished" else "cost", value=usd(story.usd), about="of all nodes"
            )
        )
    if story.usd_at_end is not None and story.progress is not None:
        tiles.append(
            Tile(
                name="cost at the end",
                value=usd(story.usd_at_end),
                about=f"expected; {share(story.progress[0])} is trained",
            )
        )
    if whole is not None:
        tiles.append(Tile(name="trained", value=f"{story.samples:,}", about=f"samples in {story.steps:,} steps"))
    if story.clock.sessions:
        sessions = len(story.clock.sessions)
        about = "of wall time" if sessions == 1 else f"in {sessions} sessions"
        tiles.append(Tile(name="run time", value=duration(story.clock.length_s), about=about))
    return tuple(tiles)


def _parts(story: Story) -> tuple[Part, ...]:
    whole = story.whole
    if whole is None:
        return ()
    total = sum(whole.parts_s.values()) or 1.0
    return tuple(
        Part(
            name=PARTS[name],
            role=PART_ROLES[name],
            share=seconds / total,
            words=f"{PARTS[name]}: {duration(seconds)}, {share(seconds / total)}",
        )
        for name, seconds in whole.parts_s.items()
        if seconds > 0
    )


def _metrics(stories: Sequence[Story], names: Sequence[str], *, key: str) -> list[Metric]:
    points = [points_of(story) for story in stories]
    length_s = max((story.clock.length_s for story in stories), default=1.0)
    found = []
    for place, metric in enumerate(list(dict.fromkeys(name for each in points for name in each))[:MOST_METRICS]):
        lines = [
            (name, RUN_ROLES[number % len(RUN_ROLES)], each[metric])
            for number, (name, each) in enumerate(zip(names, points, strict=True))
            if metric in each
        ]
        found.append(
            Metric(
                name=text(metric, 120),
                last=last_value(lines[0][2]) if len(lines) == 1 else "",
                charts=tuple(charts_of(text(metric, 120), lines, length_s, key=f"{key}-{place}")),
            )
        )
    return found


def _together(stories: Sequence[Story], names: Sequence[str]) -> list[Chart]:
    """Throughput and stall of all runs, over the time of each."""
    length_s = max(story.clock.length_s for story in stories)
    shown = (
        ("samples_per_s", "throughput", "Throughput of all runs", "samples/s", "", "Higher is faster.", None),
        (
            "stall",
            "stall",
            "Stall of all runs",
            "share of time",
            "share",
            "Lower is better: 0% means that no worker waits for data.",
            False,
        ),
    )
    charts = []
    for column, key, title, label, unit, reading, log in shown:
        lines: list[Line] = []
        for number, (story, name) in enumerate(zip(stories, names, strict=True)):
            intervals = story.records.intervals
            values = stalls(intervals) if column == "stall" else intervals[column]
            style = {"dash": number % 2 == 1}
            line = bins_of(story, POINTS // 2).line(
                name, RUN_ROLES[number % len(RUN_ROLES)], values, ranges=False, **style
            )
            if any(value is not None for value in line.y):
                lines.append(line)
        if lines:
            charts.append(
                Chart(
                    key=f"all-{key}",
                    title=title,
                    reading=reading,
                    x=time_axis(length_s),
                    y=value_axis(label, lines, unit=unit, log=log),
                    lines=tuple(lines),
                    tall=column == "samples_per_s",
                )
            )
    return charts


def _event_groups(story: Story) -> tuple[EventGroup, ...]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for each in story.told:
        groups.setdefault(each.group, []).append((moment(each.at_s), each.words))
    found = []
    for group, title in GROUPS.items():
        rows = groups.get(group, [])
        # The same words again and again (a decision to keep the size) are one row with their number.
        folded: list[tuple[str, str, int]] = []
        for at, words in rows:
            if folded and folded[-1][1] == words:
                folded[-1] = (folded[-1][0], words, folded[-1][2] + 1)
            else:
                folded.append((at, words, 1))
        shown = [(at, words if times == 1 else f"{words} ({times:,} times)") for at, words, times in folded]
        if shown:
            left_out = max(len(shown) - MOST_EVENTS, 0)
            kept = [*shown[: MOST_EVENTS // 2], *shown[-MOST_EVENTS // 2 :]] if left_out else shown
            found.append(EventGroup(title=title, rows=tuple(kept), left_out=left_out))
    return tuple(found)


def _when(story: Story) -> str:
    if not story.clock.sessions:
        return ""
    began = story.clock.sessions[0].began
    try:
        return datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def _error(story: Story) -> Any:
    if story.status == "failed":
        ends = [event.get("error") for event in story.records.events if event["event"] == "run_finished"]
        return next((each for each in reversed(ends) if each), story.records.summary.get("error"))
    return None


def _cost_note(story: Story) -> str:
    missing = money_missing(story)
    if missing is not None:
        return missing
    said = [f"{usd(story.usd)} so far, now {usd(story.usd_per_hour)} an hour."]
    if story.usd_at_end is not None and story.progress is not None:
        said.append(
            f"At the present rate the training ends in {duration(story.progress[1])} and costs {usd(story.usd_at_end)} in all."
        )
    said.append(
        "The cost counts each node from the run's start, or from when it joined. Starting the cluster is not in it."
    )
    if len(story.clock.sessions) > 1:
        said.append("Time between the sessions is not in it either.")
    return " ".join(said)
