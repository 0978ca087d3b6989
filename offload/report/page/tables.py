"""What a page says in rows: the nodes' lanes, predictions, checkpoints, faults and skipped samples of a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from offload.formatting import count, duration, figure, moment, rate, share, times, usd
from offload.report.events import (
    CheckpointWritten,
    FirstStep,
    GainMeasured,
    RunResumed,
    RunStarted,
    WorkerLost,
    WorkersResumed,
)
from offload.report.json_values import number, table, text
from offload.report.page.node_history import Span
from offload.report.page.story import Story

MOST_LANES = 40
MOST_ROWS = 100
MOST_RAW = 1000  # raw events that a page holds
STOPS = (WorkerLost, RunResumed)  # faults after which workers start again; training goes on after all others


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. ``numeric``: which columns hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A part of a lane, as shares of the run's length. ``kind``: ``there``, ``preprocessing`` or ``training``."""

    kind: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A happening on a lane. ``place``: its share of the run's length; ``words``: what and when."""

    kind: str
    place: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One node over time. ``words``: the lane in a sentence."""

    name: str
    about: str
    bars: tuple[Bar, ...]
    pins: tuple[Pin, ...]
    words: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A predicted and a measured rate, with their places on a common scale from 0 to 1."""

    when: str
    predicted: str
    measured: str
    error: str
    predicted_at: float
    measured_at: float


def lanes(story: Story) -> tuple[Lane, ...]:
    """The nodes as lanes, at most ``MOST_LANES``."""
    length_s = max(story.clock.length_s, 1e-9)
    shown = []
    for node in story.nodes[:MOST_LANES]:
        spans: dict[str, list[Span]] = {
            "there": node.there,
            "preprocessing": node.preprocessing,
            "training": node.training,
        }
        bars = tuple(
            Bar(kind=kind, low=began / length_s, high=ended / length_s)
            for kind, node_spans in spans.items()
            for began, ended in node_spans
        )
        pins = tuple(
            Pin(
                kind=happening.kind,
                place=happening.at_s / length_s,
                words=f"{node.name}: {_HAPPENED[happening.kind]} at {moment(happening.at_s)}",
            )
            for happening in node.happenings
        )
        about = ", ".join(
            filter(
                None,
                (
                    node.instance_type,
                    f"{node.cpus:g} CPUs",
                    f"{node.gpus:g} × {node.gpu_type or 'GPU'}" if node.gpus else "",
                    "spot" if node.spot else "",
                ),
            )
        )
        sentences = [
            f"{kind} {share(sum(b - a for a, b in node_spans) / length_s)} of the run"
            for kind, node_spans in spans.items()
            if node_spans
        ]
        sentences += [pin.words for pin in pins]
        shown.append(Lane(name=node.name, about=about, bars=bars, pins=pins, words="; ".join(sentences)))
    return tuple(shown)


_HAPPENED = {
    "joined": "joined",
    "notice": "got notice",
    "lost": "lost without notice",
    "left": "left",
    "excluded": "no longer used",
}


def comparisons(story: Story) -> tuple[Comparison, ...]:
    """The rates that decisions predicted, and those measured afterwards."""
    pairs = []
    for event in story.records.events:
        if not isinstance(event, GainMeasured):
            continue
        predicted, measured = number(event.predicted_samples_per_s), number(event.measured_samples_per_s)
        if predicted > 0 and measured > 0:
            pairs.append((float(story.clock.seconds(event.at)), predicted, measured))
    pairs = pairs[-MOST_LANES:]
    most = max((max(p, m) for _, p, m in pairs), default=1.0) * 1.05
    return tuple(
        Comparison(
            when=moment(at_s),
            predicted=rate(predicted),
            measured=rate(measured),
            error=f"{100 * (measured / predicted - 1):+.0f}%".replace("-", "−"),
            predicted_at=predicted / most,
            measured_at=measured / most,
        )
        for at_s, predicted, measured in pairs
    )


def checkpoints(story: Story) -> Table | None:
    """The checkpoints by reason, and what they cost; None if there are none."""
    groups: dict[str, list[CheckpointWritten]] = {}
    for event in story.records.events:
        if isinstance(event, CheckpointWritten):
            groups.setdefault(text(event.reason, 60) or "unknown", []).append(event)
    if not groups:
        return None
    rows, waited_s = [], 0.0
    for reason, events in groups.items():
        seconds = [number(event.seconds) for event in events]
        seconds = [s for s in seconds if s == s]
        waiting = sum(s for s, event in zip(seconds, events, strict=False) if event.waited)
        waited_s += waiting
        mean = sum(seconds) / len(seconds) if seconds else float("nan")
        rows.append((reason, f"{len(events):,}", duration(mean), duration(waiting), _worth(story, waiting)))
    length_s = max(story.clock.length_s, 1e-9)
    return Table(
        head=("reason", "number", "mean time", "training waited", "cost of waiting"),
        rows=tuple(rows),
        numeric=(1, 2, 3, 4),
        note=f"Training waited {duration(waited_s)} for checkpoints: {share(waited_s / length_s)} of the run.",
    )


def faults(story: Story) -> Table | None:
    """Faults with the time without steps, the steps that were made again, and their cost; None if there are none."""
    rows = []
    for place, event in enumerate(story.records.events):
        stopped = isinstance(event, STOPS)
        if event.GROUP != "fault" and not stopped:
            continue
        worded = story.worded(place)
        lost_s, again = _aftermath(story, place) if stopped else (None, None)
        rows.append(
            (
                moment(worded.at_s),
                worded.words,
                duration(lost_s) if lost_s is not None else "–",
                "–" if again is None else f"{again:,}",
                _worth(story, lost_s) if lost_s is not None else "–",
            )
        )
    if not rows:
        return None
    return Table(
        head=("at", "what happened", "without steps", "steps repeated", "cost"),
        rows=tuple(rows[:MOST_ROWS]),
        numeric=(2, 3, 4),
        note=_more(len(rows)),
    )


def _aftermath(story: Story, place: int) -> tuple[float | None, int | None]:
    """The seconds from this event to the next first step, and the steps that are made again from the checkpoint on."""
    intervals, at = story.records.intervals, story.records.events[place].at
    steps = intervals["step"][intervals["at"] <= at]
    again = None
    for later, event in enumerate(islice(story.records.events, place + 1, None), place + 1):
        if isinstance(event, STOPS):
            return None, None  # the row of this event has it
        if isinstance(event, WorkersResumed) and len(steps) and number(event.step) >= 0 and steps[-1] >= 0:
            again = max(int(steps[-1]) - int(number(event.step)), 0)
        if isinstance(event, FirstStep):
            lost_s = story.worded(later).at_s - story.worded(place).at_s
            return (lost_s if lost_s >= 0 else None), again  # the host's clock may have been set back
    return None, again


def skipped(story: Story) -> Table | None:
    """Skipped samples grouped by reason, the most frequent first; None if there are none."""
    groups: dict[tuple[str, str], list[str]] = {}
    for line in story.records.skipped:
        reason = text(line.get("reason"), 300)
        # One sentence for samples that failed alike: their own numbers differ.
        sample = text(line.get("sample_id"), 60)
        alike = reason.replace(sample, "…") if len(sample) > 1 or not sample.isdigit() else reason
        groups.setdefault((text(line.get("dataset"), 60), alike), []).append(sample)
    if not groups:
        return None
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [
        (f"{len(ids):,}", dataset, reason, ", ".join(ids[:8]) + (", …" if len(ids) > 8 else ""))
        for (dataset, reason), ids in ordered
    ]
    total = len(story.records.skipped)
    return Table(
        head=("samples", "data set", "reason", "which"),
        rows=tuple(rows[:MOST_ROWS]),
        numeric=(0,),
        note=f"{count(total, 'sample was', 'samples were')} skipped. skipped.jsonl lists them all. {_more(len(rows))}".strip(),
    )


def setup(story: Story) -> Table:
    """The nodes, data sets, size and versions of a run."""
    rows: list[tuple[str, str]] = []
    kinds: dict[str, int] = {}
    for node in story.nodes:
        gpus = f", {node.gpus:g} × {node.gpu_type or 'GPU'}" if node.gpus else ""
        name = f"{node.kind} ({node.cpus:g} CPUs{gpus})"
        kinds[name] = kinds.get(name, 0) + 1
    for name, number_of in kinds.items():
        rows.append(("nodes", f"{number_of} × {name}"))
    for event in story.records.events:
        for name, about in table(event.datasets).items() if isinstance(event, RunStarted) else ():
            about = table(about)
            size = number(about.get("samples"))
            known = f", {int(size):,} samples" if size == size else ""
            rows.append((f"data set {text(name, 60)}", f"{text(about.get('source'), 300)}{known}"))
    last = story.last
    if last is not None:
        rows.append(("last size", f"{count(last.workers, 'worker')}, global batch {last.global_batch_size:,}"))
        if last.core_seconds_per_sample is not None:
            wire = last.wire_bytes_per_sample
            rows.append(
                (
                    "a sample costs",
                    f"{figure(last.core_seconds_per_sample * 1000)} core-ms"
                    + (f" and {figure(wire / 1000)} kB on the wire" if wire is not None else ""),
                )
            )
    summary = story.records.summary
    if summary.get("checkpoint"):
        rows.append(("checkpoint", text(summary["checkpoint"])))
    rows.append(("run directory", str(story.records.path)))
    for name, version in table(summary.get("versions")).items():
        rows.append((text(name, 60), text(version, 60)))
    return Table(head=("what", "value"), rows=tuple(dict.fromkeys(rows)))


def speed_up_words(value: float, low: float, high: float) -> str:
    """A factor with its confidence interval."""
    return f"{times(value)} ({low:.2f} to {high:.2f})"


def _worth(story: Story, seconds: float) -> str:
    if story.usd_per_hour is None:
        return "–"
    return usd(story.usd_per_hour / 3600 * seconds)


def _more(rows: int) -> str:
    return f"The page shows the first {MOST_ROWS} of {rows:,} rows." if rows > MOST_ROWS else ""
