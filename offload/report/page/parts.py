"""What the page says of a run in its own form: the main numbers, the parts of a step, metrics, and events by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.formatting import duration, figure, moment, share, usd
from offload.report.events import GROUPS
from offload.report.json_values import text
from offload.report.page.charts.chart import Chart
from offload.report.page.charts.metric_charts import charts_of, last_value, points_of
from offload.report.page.charts.run_charts import PART_ROLES
from offload.report.page.measured import PARTS
from offload.report.page.story import Story
from offload.report.page.verdict import money_missing

MOST_METRICS = 24
MOST_EVENTS = 60  # events shown of a group; the raw ones follow
RUN_ROLES = ("measured", "input", "device", "a", "b", "c", "d", "e", "f", "other")


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number in large type, with its name and what it means."""

    name: str
    value: str
    about: str


@dataclass(frozen=True, kw_only=True)
class StepPart:
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


def tiles(story: Story) -> tuple[Tile, ...]:
    """The main numbers of a run."""
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


def parts(story: Story) -> tuple[StepPart, ...]:
    """The parts of a mean step."""
    whole = story.whole
    if whole is None:
        return ()
    total = sum(whole.parts_s.values()) or 1.0
    return tuple(
        StepPart(
            name=PARTS[name],
            role=PART_ROLES[name],
            share=seconds / total,
            words=f"{PARTS[name]}: {duration(seconds)}, {share(seconds / total)}",
        )
        for name, seconds in whole.parts_s.items()
        if seconds > 0
    )


def metrics(stories: Sequence[Story], names: Sequence[str], *, key: str) -> list[Metric]:
    """The metrics of one or several runs, each with its charts; ``key`` begins the charts' names."""
    points = [points_of(story) for story in stories]
    length_s = max((story.clock.length_s for story in stories), default=1.0)
    shown = []
    for place, metric in enumerate(list(dict.fromkeys(name for of_run in points for name in of_run))[:MOST_METRICS]):
        lines = [
            (name, RUN_ROLES[number % len(RUN_ROLES)], of_run[metric])
            for number, (name, of_run) in enumerate(zip(names, points, strict=True))
            if metric in of_run
        ]
        shown.append(
            Metric(
                name=text(metric, 120),
                last=last_value(lines[0][2]) if len(lines) == 1 else "",
                charts=tuple(charts_of(text(metric, 120), lines, length_s, key=f"{key}-{place}")),
            )
        )
    return shown


def event_groups(story: Story) -> tuple[EventGroup, ...]:
    """The events in words by group."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for worded in story.worded_events:
        groups.setdefault(worded.event.GROUP, []).append((moment(worded.at_s), worded.words))
    shown_groups = []
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
            shown_groups.append(EventGroup(title=title, rows=tuple(kept), left_out=left_out))
    return tuple(shown_groups)


def cost_note(story: Story) -> str:
    """The cost in sentences."""
    missing = money_missing(story)
    if missing is not None:
        return missing
    sentences = [f"{usd(story.usd)} so far, now {usd(story.usd_per_hour)} an hour."]
    if story.usd_at_end is not None and story.progress is not None:
        sentences.append(
            f"At the present rate the training ends in {duration(story.progress[1])} and costs {usd(story.usd_at_end)} in all."
        )
    sentences.append(
        "The cost counts each node from the run's start, or from when it joined. Starting the cluster is not in it."
    )
    if len(story.clock.sessions) > 1:
        sentences.append("Time between the sessions is not in it either.")
    return " ".join(sentences)
