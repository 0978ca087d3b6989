"""What ``offload watch`` shows of a run, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from offload.report.page.numbers import count, duration, figure, moment, rate, share, usd
from offload.report.page.story import Story
from offload.report.page.words import group_of

MOST_EVENTS = 6
MOST_NODES = 12
QUIET_S = 60.0  # without a line for so long, a run that trains has probably crashed


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


def _newest(story: Story, group: str, most: int = MOST_EVENTS) -> tuple[str, ...]:
    """The newest events of a group in words, the oldest first, and no others: a long run has many, and a view looks every two seconds."""
    kinds = [event["event"] for event in story.records.events]
    places = (at for at in reversed(range(len(kinds))) if kinds[at] != "ignored" and group_of(kinds[at]) == group)
    found = [story.telling(at) for at in islice(places, most)]
    return tuple(f"{moment(told.at_s)}  {told.words}" for told in reversed(found))


def _nodes(story: Story) -> tuple[tuple[str, str], ...]:
    end = story.clock.length_s
    there = [node for node in story.nodes if node.there_at(end)]
    found = []
    for node in there[:MOST_NODES]:
        does = [
            what
            for what, spans in (("trains", node.training), ("preprocesses", node.preprocessing))
            if spans and spans[-1][1] >= end
        ]
        found.append((node.name, f"{node.kind}: {', '.join(does) or 'idle'}"))
    if len(there) > MOST_NODES:
        found.append(("…", f"{len(there) - MOST_NODES} more"))
    return tuple(found)
