"""What ``offload arbiter status`` prints: the cluster, its runs, and what more would bring.

Where it stops: every number comes from :class:`~offload.arbiter.status.Status`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.arbiter.status import RunStatus, Status
from offload.arbiter.values import same
from offload.formatting import count, duration, figure, times
from offload.model.allocation.values import Holding
from offload.model.allocation.what_if import MORE_CORES

WIDEST = 1000  # a narrower console shortens numbers
BAR = 20  # characters of the bar of a node
_RUNS, _OTHERS, _FREE = "█", "▒", "·"


def status_text(status: Status) -> str:
    """The status as lines."""
    out = io.StringIO()
    console = Console(file=out, width=WIDEST, force_terminal=False, force_jupyter=False, highlight=False)
    console.print(Text(headline(status)), soft_wrap=True)
    if status.nodes:
        console.print()
        console.print(_nodes(status))
        console.print(Text(f"{_RUNS} runs   {_OTHERS} other programs   {_FREE} free"))
    if status.runs:
        console.print()
        console.print(_runs(status))
        for run in status.runs:
            console.print(Text(f"{run.name}: {sentence(run)}"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def headline(status: Status) -> str:
    """The cluster, its rules and the next decision, in sentences."""
    cpus, gpus = sum(node.cpus for node in status.nodes), sum(node.gpus for node in status.nodes)
    has = f"{count(len(status.nodes), 'node')} with {cpus:g} CPUs and {gpus:g} GPUs" if status.nodes else "not seen yet"
    budget = "" if status.rules.usd_per_hour is None else f", at most ${status.rules.usd_per_hour:,.2f} an hour"
    shorter = f", shorter first {status.rules.shorter_first:g}" if status.rules.shorter_first else ""
    if not status.runs:
        next_one = "No run has reported; the next one that does is decided at once."
    elif status.next_decision_at is None:
        next_one = "It decides once it has seen the cluster."
    else:
        left = max(status.next_decision_at - status.at, 0.0)
        next_one = f"It decides again in {duration(left)}, or at once if a run comes or goes."
    return (
        f"The arbiter has run for {duration(max(status.at - status.started_at, 0.0))}: {count(len(status.runs), 'run')} on a cluster "
        f"{_of(has)}, fairness {status.rules.fairness:g}{shorter}{budget}. {next_one}"
    )


def _of(has: str) -> str:
    return f"of {has}" if has.split()[0][0].isdigit() else f"that was {has}"


def sentence(run: RunStatus) -> str:
    """Why a run has what it has, and what it waits for or changes."""
    return f"{run.reason}. It {run.doing}." if run.doing else f"{run.reason}."


def holding_words(holding: Holding) -> str:
    """``2 × A100 + 8 cores``."""
    if not holding.worker_count and not holding.core_count:
        return "nothing"
    workers = f"{holding.worker_count} × {holding.kind or 'worker'}"
    return f"{workers} + {count(holding.core_count, 'core')}"


def gain(now: float, then: float | None) -> str:
    """A goodput with more, and how many times it is the present one."""
    if then is None:
        return "–"
    return f"{figure(then)}/s ({times(then / now)})" if now > 0 else f"{figure(then)}/s"


def run_rows(runs: Sequence[RunStatus], at: float) -> list[tuple[str, ...]]:
    """A row of ``RUN_COLUMNS`` for each run."""
    return [
        (
            run.name,
            holding_words(run.holding),
            "the same" if same(run.holding, run.to_hold) else holding_words(run.to_hold),
            duration(max(at - run.since, 0.0)),
            f"{run.priority}",
            f"{run.weight:g}",
            f"{figure(run.what_if.now)}/s" if run.what_if else "–",
            gain(run.what_if.now, run.what_if.one_more_worker) if run.what_if else "–",
            gain(run.what_if.now, run.what_if.more_cores) if run.what_if else "–",
        )
        for run in runs
    ]


RUN_COLUMNS = (
    "run",
    "has",
    "is to have",
    "since",
    "priority",
    "weight",
    "goodput",
    "with a worker more",
    f"with {MORE_CORES} cores more",
)
NUMERIC = (3, 4, 5, 6, 7, 8)


def _runs(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, name in enumerate(RUN_COLUMNS):
        table.add_column(name, justify="right" if at in NUMERIC else "left", no_wrap=True)
    for row in run_rows(status.runs, status.at):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _nodes(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("node", "CPUs", "", "GPUs", ""):
        table.add_column(name, no_wrap=True, justify="right" if name in ("CPUs", "GPUs") else "left")
    for node in status.nodes:
        kind = f" {node.gpu_type}" if node.gpu_type else ""
        table.add_row(
            Text(node.address),
            f"{node.cpus:g}",
            Text(_bar(node.cpus, node.cpus_of_runs, node.cpus_of_others)),
            Text(f"{node.gpus:g}{kind}"),
            Text(_bar(node.gpus, node.gpus_of_runs, node.gpus_of_others)),
        )
    return table


def _bar(whole: float, runs: float, others: float) -> str:
    if not whole:
        return ""
    of_runs = min(round(BAR * runs / whole), BAR)
    of_others = min(round(BAR * others / whole), BAR - of_runs)
    return _RUNS * of_runs + _OTHERS * of_others + _FREE * (BAR - of_runs - of_others)
