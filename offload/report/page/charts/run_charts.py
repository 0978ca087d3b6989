"""The charts of one run: rates, shares of time, sizes and cost over the seconds of the run."""

from __future__ import annotations

import numpy as np

from offload.formatting import GOODPUT_DIFFERS, duration, moment
from offload.report.events import ClusterChanged, RunStarted
from offload.report.json_values import number
from offload.report.page.charts.chart import (
    POINTS,
    Bins,
    Chart,
    ChartLine,
    Mark,
    merged,
    time_axis,
    value_axis,
    values_of,
)
from offload.report.page.measured import PARTS, other_s, stalls
from offload.report.page.records import Floats
from offload.report.page.story import Story

GROUP_ROLES = ("a", "b", "c", "d", "e", "f")
LEAST_PAUSE_S, PAUSE = 10.0, 5.0  # seconds, and usual intervals, without a measurement that break a line
NEAR_ALL = 0.93  # top of an axis of shares: with the margin above it, 100 % is always visible
PART_ROLES = {"data_wait_s": "stall", "peer_wait_s": "b", "compute_s": "device", "sync_s": "c", "other_s": "other"}


def bins_of(story: Story, points: int = POINTS) -> Bins:
    """The bins of all charts over time. Lines break between two sessions, and where nothing was measured for a while."""
    at = story.records.intervals["at"]
    if not len(at):
        return Bins.of(at)
    # A clock that was set back must not run a line backwards.
    seconds = np.maximum.accumulate(story.clock.seconds(at))
    session = np.maximum.accumulate(story.clock.session_of(at))
    between = np.diff(seconds, prepend=seconds[0])
    usual_s = float(np.median(between[1:])) if len(between) > 1 else 0.0
    pauses = np.cumsum(between > max(LEAST_PAUSE_S, PAUSE * usual_s))
    return Bins.of(seconds, session + pauses, points)


def marks_of(story: Story) -> tuple[Mark, ...]:
    """The decisions, faults and resumptions of a run."""
    axis = time_axis(story.clock.length_s)
    marks = []
    for place, event in enumerate(story.records.events):
        if event.changes:
            worded = story.worded(place)
            kind = "fault" if event.GROUP == "fault" else "decision"
            marks.append(Mark(x=worded.at_s, kind=kind, words=(f"{moment(worded.at_s)} {worded.words}",)))
    marks += [
        Mark(x=at_s, kind="resumed", words=(f"{moment(at_s)} The run was resumed here, {duration(gap_s)} later",))
        for at_s, gap_s in story.clock.resumed_at_s
    ]
    return merged(marks, axis)


def throughput(story: Story, bins: Bins) -> Chart:
    """Samples/s with both ceilings."""
    intervals = story.records.intervals
    rate, goodput = intervals["samples_per_s"], intervals["goodput"]
    lines = [
        bins.line("measured", "measured", rate),
        bins.line("input ceiling", "input", intervals["input_ceiling_samples_per_s"], ranges=False, dash=True),
        bins.line(
            f"{story.device} ceiling", "device", intervals["device_ceiling_samples_per_s"], ranges=False, dash=True
        ),
    ]
    if np.nansum(goodput) < GOODPUT_DIFFERS * np.nansum(rate):
        lines.insert(1, bins.line("goodput", "a", goodput, ranges=False))
    lines = [line for line in lines if _known(line)]
    return Chart(
        key="throughput",
        title="Throughput and both ceilings",
        reading=(
            "The lower ceiling is the bottleneck. Throughput near the input ceiling: more preprocessing helps. Near the "
            f"{story.device} ceiling: the accelerators are busy, and more CPUs would not help."
        ),
        x=time_axis(story.clock.length_s),
        y=value_axis("samples/s", lines),
        lines=tuple(lines),
        marks=marks_of(story),
        tall=True,
    )


def busy(story: Story, bins: Bins) -> Chart:
    """The stall, and the busy shares of accelerators and of the preprocessing cores by kind of node."""
    intervals = story.records.intervals
    with np.errstate(invalid="ignore", divide="ignore"):
        computing = (intervals["compute_s"] + intervals["sync_s"]) / intervals["step_time_s"]
        lines = [
            bins.line("stall", "stall", stalls(intervals)),
            bins.line(f"{story.device}s busy", "device", np.clip(computing, 0, 1), ranges=False),
        ]
        for role, (kind, busy_s) in zip(GROUP_ROLES, intervals.busy_s.items(), strict=False):
            shares = busy_s / (intervals.cores[kind] * intervals["seconds"])
            lines.append(
                bins.line(f"preprocessing cores of {kind} busy", role, np.clip(shares, 0, 1), ranges=False, dash=True)
            )
        if not intervals.busy_s:
            shares = intervals["samples_per_s"] / intervals["input_ceiling_samples_per_s"]
            lines.append(bins.line("preprocessing cores busy", "input", np.clip(shares, 0, 1), ranges=False, dash=True))
    lines = [line for line in lines if _known(line)]
    return Chart(
        key="busy",
        title="Stall, and how busy accelerators and CPUs are",
        reading=(
            f"Stall is the share of a step that waits for data: near 0%, the {story.device}s set the pace; near 100%, the input does. "
            "CPU cores count the CPU time of finished tasks: idle cores beside a high stall wait for storage, or the network."
        ),
        x=time_axis(story.clock.length_s),
        y=value_axis("share of time", lines, unit="share", log=False, least_high=NEAR_ALL),
        lines=tuple(lines),
    )


def step_parts(story: Story, bins: Bins) -> Chart:
    """The parts of a step's time as a stack of shares."""
    intervals = story.records.intervals
    columns = {name: np.nan_to_num(intervals[name]) for name in list(PARTS)[:-1]} | {"other_s": other_s(intervals)}
    total = sum(columns.values())
    lines, below = [], np.zeros(len(bins.x))
    sums = {name: _sums(bins, column) for name, column in columns.items()}
    whole = _sums(bins, np.asarray(total))
    for name, column in sums.items():
        share = np.divide(column, whole, out=np.full(len(whole), np.nan), where=whole > 0)
        above = below + np.nan_to_num(share)
        if np.nansum(column) > 0.001 * np.nansum(whole):
            shown = np.isfinite(share)
            lines.append(
                ChartLine(
                    name=PARTS[name],
                    role=PART_ROLES[name],
                    x=bins.broken(bins.x),
                    y=bins.broken(values_of(share)),
                    low=bins.broken(values_of(np.where(shown, below, np.nan))),
                    high=bins.broken(values_of(np.where(shown, above, np.nan))),
                    filled=True,
                )
            )
        below = above
    return Chart(
        key="step",
        title="Where each second of a step goes, over time",
        reading="The parts of a step's wall time, as shares. Compute near the full height means busy accelerators.",
        x=time_axis(story.clock.length_s),
        y=value_axis("share of step time", lines, unit="share", log=False, least_high=NEAR_ALL),
        lines=tuple(lines),
    )


def sizes(story: Story, bins: Bins) -> list[Chart]:
    """Workers, global batch, accumulation and preprocessing cores: a small chart each."""
    intervals = story.records.intervals
    marks = marks_of(story)
    shown = (
        ("workers", "Workers", "workers", "Training processes. Each holds one accelerator.", "a"),
        (
            "global_batch_size",
            "Global batch",
            "samples",
            "Samples of one optimizer step, over all workers.",
            "measured",
        ),
        (
            "accum_steps",
            "Micro-batches",
            "a step",
            "Forward and backward passes of a worker before each optimizer step: accumulation + 1.",
            "c",
        ),
        (
            "preprocessing_cores",
            "Preprocessing cores",
            "cores",
            "Cores that preprocess now. They fall while nodes leave, or workers take their cores.",
            "input",
        ),
    )
    charts = []
    for name, title, unit, reading, role in shown:
        values = intervals[name] + (1 if name == "accum_steps" else 0)
        if not np.isfinite(values).any():
            values = _cores_in_events(story) if name == "preprocessing_cores" else values
        line = bins.line(title.lower(), role, values, ranges=False, steps=True)
        if _known(line):
            charts.append(
                Chart(
                    key=name.replace("_", "-"),
                    title=title,
                    reading=reading,
                    x=time_axis(story.clock.length_s),
                    y=value_axis(unit, [line], unit="count", log=False),
                    lines=(line,),
                    marks=marks if name == "workers" else (),
                )
            )
    return charts


def cost(story: Story) -> Chart | None:
    """The dollars over time, and their expected way to the end; None if a price is unknown."""
    spending, length_s = story.spending, story.clock.length_s
    if spending is None or length_s <= 0:
        return None
    edges = sorted({0.0, length_s, *(t for began, ended, _ in spending.spans for t in (began, ended))})
    if len(edges) > POINTS:
        edges = list(np.linspace(0.0, length_s, POINTS))
    lines = [ChartLine(name="spent", role="measured", x=tuple(edges), y=values_of(spending.up_to(edges)))]
    end_s = length_s
    if story.usd_at_end is not None and story.progress is not None and story.usd is not None:
        end_s = length_s + story.progress[1]
        lines.append(
            ChartLine(name="expected", role="input", x=(length_s, end_s), y=(story.usd, story.usd_at_end), dash=True)
        )
    return Chart(
        key="cost",
        title="Cost",
        reading="Dollars of all nodes, from the start of the run. A steeper line means more nodes, or dearer ones.",
        x=time_axis(end_s),
        y=value_axis("dollars", lines, unit="usd", log=False),
        lines=tuple(lines),
    )


def _cores_in_events(story: Story) -> Floats:
    """The preprocessing cores from the events, for runs of earlier versions."""
    at = story.records.intervals["at"]
    cores = np.full(len(at), np.nan)
    for event in story.records.events:
        if isinstance(event, RunStarted | ClusterChanged) and (known := number(event.preprocessing_cores)) == known:
            cores[at >= event.at] = known
    return cores


def _known(line: ChartLine) -> bool:
    return any(value is not None for value in line.y)


def _sums(bins: Bins, values: Floats) -> Floats:
    sums: Floats = np.bincount(bins.which.astype(int), weights=np.nan_to_num(values), minlength=len(bins.x)).astype(
        np.float64
    )
    return sums
