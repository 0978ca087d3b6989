"""The page as one value: everything that it shows of one or several runs, ready to render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from offload.formatting import count
from offload.model.catalog import Catalog
from offload.report.events import RunFinished
from offload.report.json_values import text
from offload.report.page.charts.chart import POINTS, Chart, ChartLine, time_axis, value_axis
from offload.report.page.charts.run_charts import bins_of, busy, cost, sizes, step_parts, throughput
from offload.report.page.compare import comparison, names_of, speed_up
from offload.report.page.measured import stalls
from offload.report.page.parts import (
    RUN_ROLES,
    EventGroup,
    Metric,
    StepPart,
    Tile,
    cost_note,
    event_groups,
    metrics,
    parts,
    tiles,
)
from offload.report.page.records import Records
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
from offload.report.page.verdict import against_alone, bottleneck, what_next

SHOWN_METRICS = 4  # the rest is behind a fold


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
    parts: tuple[StepPart, ...]
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


def page_of(records: Sequence[Records], catalog: Catalog, prices: Mapping[str, float]) -> PageView:
    """The page of these runs. ``prices``: the user's, see :class:`offload.report.page.money.Prices`."""
    stories = [Story(record, catalog, prices) for record in records]
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
        metrics=tuple(metrics(stories, names, key="all")),
    )


def run_view(story: Story, name: str, *, key: str, points: int = POINTS) -> RunView:
    """What the page shows of one run."""
    steps = story.whole is not None
    bins = bins_of(story, points)
    lines = story.records.lines
    raw = [*lines[: MOST_RAW // 2], *lines[-MOST_RAW // 2 :]] if len(lines) > MOST_RAW else lines
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
        tiles=tiles(story),
        throughput=throughput(story, bins) if steps else None,
        busy=busy(story, bins) if steps else None,
        parts=parts(story),
        step=step_parts(story, bins) if steps else None,
        sizes=tuple(sizes(story, bins)) if steps else (),
        comparisons=comparisons(story),
        lanes=lanes(story),
        lanes_note=f"{count(more_lanes, 'more node')} came later." if more_lanes else "",
        metrics=tuple(metrics([story], [name], key="metric")),
        cost=cost(story),
        cost_note=cost_note(story),
        checkpoints=checkpoints(story),
        faults=faults(story),
        skipped=skipped(story),
        events=event_groups(story),
        raw=tuple(text(json.dumps(line, ensure_ascii=False), 1200) for line in raw),
        raw_left_out=len(lines) - len(raw),
        setup=setup(story),
        notes=story.records.notes,
    )


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
        lines: list[ChartLine] = []
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
        errors = [event.error for event in story.records.events if isinstance(event, RunFinished)]
        return next((error for error in reversed(errors) if error), story.records.summary.get("error"))
    return None


def document_of(
    page: PageView, records: Sequence[Records], catalog: Catalog, prices: Mapping[str, float]
) -> dict[str, Any]:
    """The page's numbers for other programs, without the charts."""
    stories = [Story(record, catalog, prices) for record in records]
    runs = []
    for story, view in zip(stories, page.runs, strict=True):
        whole = story.whole
        faster = speed_up(stories[0], story) if story is not stories[0] else None
        runs.append(
            {
                "name": view.name,
                "run_dir": str(story.records.path),
                "status": view.status,
                "error": view.error or None,
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
