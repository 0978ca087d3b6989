"""What ``offload watch`` shows of a run: one value, drawn as a screen or written as one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offload.formatting import count, duration, figure, moment, rate, share, usd
from offload.report.events import EventIgnored, GroupName
from offload.report.page.story import Story

MOST_EVENTS = 6
MOST_NODES = 12
QUIET_S = 60.0  # time without a line after which a run that trains has probably crashed


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The present state of a run.

    Args:
        name: the name of the run directory.
        status: ``finished``, ``failed``, ``interrupted`` or ``unfinished``.
        facts: names and values: progress, rates, both ceilings, stall, workers, last checkpoint, cost.
        nodes: the nodes that are there, each with what it does.
        decisions, errors: the newest ones in words, the oldest first.
        warning: a sentence if the run has not written anything for long; empty otherwise.
    """

    name: str
    status: str
    facts: tuple[tuple[str, str], ...]
    nodes: tuple[tuple[str, str], ...]
    decisions: tuple[str, ...]
    errors: tuple[str, ...]
    warning: str


def watched(story: Story, now: float) -> Watched:
    """The state of a run at ``now``, in seconds since 1970."""
    intervals = story.records.intervals
    facts = [("trained", f"step {story.steps:,}, {moment(story.clock.length_s)}")]
    if len(intervals):
        newest = {name: float(column[-1]) for name, column in intervals.columns.items()}
        wait_s, step_s = newest["data_wait_s"], newest["step_time_s"]
        batch, cores = newest["global_batch_size"], newest["preprocessing_cores"]
        if (known := story.last) is not None:  # intervals of earlier versions lack some of this
            batch = batch if batch == batch else float(known.global_batch_size)
            cores = cores if cores == cores or known.cores is None else float(known.cores)
        facts += [
            ("epoch", figure(newest["epoch"] + 1)),
            ("throughput", rate(newest["samples_per_s"])),
            ("input ceiling", rate(newest["input_ceiling_samples_per_s"])),
            (f"{story.device} ceiling", rate(newest["device_ceiling_samples_per_s"])),
            ("stall", share(wait_s / step_s if step_s > 0 else None)),
            ("workers", f"{figure(newest['workers'])}, global batch {figure(batch)}"),
            ("preprocessing", count(int(cores), "core") if cores == cores else "–"),
        ]
    if story.progress is not None and story.status == "unfinished":
        done, left_s = story.progress
        facts.append(("progress", f"{share(done)}, {duration(left_s)} left"))
    saved = _newest(story, "checkpoint", 1)
    facts.append(("last checkpoint", saved[0] if saved else "none yet"))
    if story.usd is not None:
        end = "" if story.usd_at_end is None else f", {usd(story.usd_at_end)} expected at the end"
        facts.append(("cost", f"{usd(story.usd)}{end}"))
    last = story.clock.sessions[-1].ended if story.clock.sessions else now
    silent = story.status == "unfinished" and now - last > QUIET_S
    return Watched(
        name=story.records.path.name,
        status=story.status,
        facts=tuple(facts),
        nodes=_nodes(story),
        decisions=_newest(story, "decision"),
        errors=_newest(story, "fault"),
        warning=f"nothing new for {duration(now - last)}: the run may have crashed" if silent else "",
    )


def _newest(story: Story, group: GroupName, most: int = MOST_EVENTS) -> tuple[str, ...]:
    """The newest events of a group in words, the oldest first, and no others: a long run has many, and a view looks every two seconds."""
    events = story.records.events
    places = (
        place
        for place in reversed(range(len(events)))
        if group == events[place].GROUP and not isinstance(events[place], EventIgnored)
    )
    newest = [story.worded(place) for place in islice(places, most)]
    return tuple(f"{moment(worded.at_s)}  {worded.words}" for worded in reversed(newest))


def _nodes(story: Story) -> tuple[tuple[str, str], ...]:
    end = story.clock.length_s
    there = [node for node in story.nodes if node.there_at(end)]
    rows = []
    for node in there[:MOST_NODES]:
        does = [
            what
            for what, spans in (("trains", node.training), ("preprocesses", node.preprocessing))
            if spans and spans[-1][1] >= end
        ]
        rows.append((node.name, f"{node.kind}: {', '.join(does) or 'idle'}"))
    if len(there) > MOST_NODES:
        rows.append(("…", f"{len(there) - MOST_NODES} more"))
    return tuple(rows)


def screen(state: Watched, output: Sequence[str] = ()) -> RenderableType:
    """The state as panels, from the most important one down: a small terminal cuts the lower ones.

    ``output``: the newest lines that the run has printed.
    """
    status = "training" if state.status == "unfinished" and not state.warning else state.status
    panels: list[RenderableType] = [_panel(Text(f"{state.name}: {status}", style="bold"), _rows(state.facts), "cyan")]
    if state.warning:
        panels.append(Text(state.warning, style="yellow"))
    for title, lines in (("errors", state.errors), ("decisions", state.decisions), ("output", output)):
        if lines:
            text = Text("\n".join(lines), no_wrap=title != "errors", overflow="ellipsis")
            panels.append(_panel(Text(title), text, "red" if title == "errors" else "dim"))
    panels.append(_panel(Text("nodes"), _rows(state.nodes), "dim"))
    return Group(*panels)


def _panel(title: Text, content: RenderableType, border: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style=border)


def plain(state: Watched) -> str:
    """The state as one line."""
    return " | ".join(
        [
            f"{state.name}: {state.status}",
            *(f"{name} {value}" for name, value in state.facts),
            *filter(None, [state.warning]),
        ]
    )


def _rows(rows: tuple[tuple[str, str], ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=max((len(name) for name, _ in rows), default=1))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
