"""The status of a cluster as an HTML page that opens without a network: tables, and a lane for each run over time.

Where it stops: every number comes from :class:`~offload.arbiter.status.Status`, and :mod:`offload.report.page` has the style.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.arbiter.status import NodeStatus, Span, Status
from offload.arbiter.text import NUMERIC, RUN_COLUMNS, headline, run_rows, sentence
from offload.formatting import count, duration
from offload.report.page.html import from_template
from offload.report.page.tables import Table

MOST_LANES = 200  # the runs that ended last


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a run held for a while, as shares of the page's time and of the most that any run held.

    Args:
        low, high: its begin and end.
        workers, cores: how high its two bars are.
        words: the same in words.
    """

    low: float
    high: float
    workers: float
    cores: float
    words: str


@dataclass(frozen=True, kw_only=True)
class RunLane:
    """One run over time. ``about``: what it holds now; ``words``: the lane in sentences."""

    name: str
    about: str
    blocks: tuple[Block, ...]
    words: str


def status_page(status: Status) -> str:
    """The page as HTML."""
    return from_template(
        "arbiter.html.j2",
        headline=headline(status),
        nodes=Table(
            head=("node", "GPU", "CPUs", "of runs", "of others", "GPUs", "of runs", "of others"),
            rows=tuple(_row(node) for node in status.nodes),
            numeric=(2, 3, 4, 5, 6, 7),
        ),
        runs=Table(head=RUN_COLUMNS, rows=tuple(run_rows(status.runs, status.at)), numeric=NUMERIC),
        reasons=Table(head=("run", "why"), rows=tuple((run.name, sentence(run)) for run in status.runs)),
        lanes=lanes(status),
        ago=duration(status.at - _begin(status)),
    )


def lanes(status: Status) -> tuple[RunLane, ...]:
    """A lane for each run that held something, in the order of their begin."""
    begin = _begin(status)
    length_s = max(status.at - begin, 1e-9)
    most_workers = max((span.workers for span in status.history), default=0) or 1
    most_cores = max((span.cores for span in status.history), default=0) or 1
    by_run: dict[str, list[Span]] = {}
    for span in status.history:
        by_run.setdefault(span.run, []).append(span)
    shown = sorted(by_run, key=lambda run: by_run[run][-1].until or status.at)[-MOST_LANES:]
    made = []
    for run in (run for run in by_run if run in shown):
        blocks = [
            Block(
                low=(span.since - begin) / length_s,
                high=((status.at if span.until is None else span.until) - begin) / length_s,
                workers=span.workers / most_workers,
                cores=span.cores / most_cores,
                words=_words(span, status.at),
            )
            for span in by_run[run]
        ]
        newest = by_run[run][-1]
        made.append(
            RunLane(
                name=run,
                about=_held(newest) if newest.until is None else "has ended",
                blocks=tuple(block for block in blocks if block.workers or block.cores),
                words="; ".join(block.words for block in blocks),
            )
        )
    return tuple(made)


def _begin(status: Status) -> float:
    return min((span.since for span in status.history), default=status.at)


def _held(span: Span) -> str:
    return f"{count(span.workers, 'worker')} and {count(span.cores, 'core')}"


def _words(span: Span, at: float) -> str:
    kind = f" on {span.kind}" if span.kind else ""
    until = "until now" if span.until is None else f"for {duration(span.until - span.since)}"
    return f"{_held(span)}{kind}, from {duration(max(at - span.since, 0.0))} ago {until}"


def _row(node: NodeStatus) -> tuple[str, ...]:
    numbers = (
        node.cpus,
        node.cpus_of_runs,
        node.cpus_of_others,
        node.gpus,
        node.gpus_of_runs,
        node.gpus_of_others,
    )
    return (node.address, node.gpu_type or "–", *(f"{number:g}" for number in numbers))
