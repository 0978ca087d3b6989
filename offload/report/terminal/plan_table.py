"""The table of a plan: the most relevant candidates, with the recommended one and the single instance marked."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.formatting import GOODPUT_DIFFERS, usd

SHOWN = 12
WIDEST = 1000  # width for tables that must not be cut: a narrower console shortens numbers
MARKS = {"recommended": "→", "baseline": "="}


def format_plan(document: dict[str, Any], *, shown: int = SHOWN) -> str:
    """The table, the explanation and the warnings as text. The table has at most ``shown`` rows and the two marked ones. It omits
    columns that add nothing (goodput equal to samples/s, hours without an amount of work)."""
    candidates = document["candidates"]
    marked = {document["baseline"]: MARKS["baseline"], document["recommended"]: MARKS["recommended"]}
    rows = sorted({*range(min(shown, len(candidates))), *marked})
    best = candidates[document["recommended"]]
    columns = {name: column for name, column in _COLUMNS.items() if column.says_something(best)}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True, min_width=1)
    table.add_column("nodes", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for at in rows:
        cells = [
            marked.get(at, ""),
            _nodes(candidates[at]),
            *(column.cell(candidates[at]) for column in columns.values()),
        ]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if at == document["recommended"] else None)
    out = io.StringIO()
    console = Console(file=out, width=WIDEST, force_terminal=False, force_jupyter=False, highlight=False)
    console.print(table)
    left = len(candidates) - len(rows)
    legend = [f"{MARKS['recommended']} recommended, {MARKS['baseline']} the single instance"]
    if left:
        legend.append(f"{left:,} more candidates in --json")
    console.print("; ".join(legend), soft_wrap=True)
    console.print(Text("\n" + document["explanation"]), soft_wrap=True)
    for warning in document["warnings"]:
        console.print(Text(f"Warning: {warning}"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _nodes(candidate: dict[str, Any]) -> str:
    return " + ".join(f"{count} × {kind}" for kind, count in candidate["shape"].items())


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _usd(value: float | None) -> str:
    return usd(value).removeprefix("$")


@dataclass(frozen=True)
class _PlanColumn:
    """A column of the table: its text for a candidate, and whether it adds information if ``best`` is the recommended one."""

    cell: Callable[[dict[str, Any]], str]
    says_something: Callable[[dict[str, Any]], bool] = lambda best: True


_COLUMNS = {
    "workers ×\nbatch × micro": _PlanColumn(
        lambda c: f"{c['workers']} × {c['local_batch_size']} × {c['accum_steps'] + 1}"
    ),
    "samples/s\n(95 %)": _PlanColumn(
        lambda c: (
            f"{_figure(c['samples_per_s'])} ({_figure(c['samples_per_s_low'])}–{_figure(c['samples_per_s_high'])})"
        )
    ),
    "stall": _PlanColumn(lambda c: f"{c['stall']:.0%}"),
    "binds": _PlanColumn(lambda c: str(c["bottleneck"])),
    "goodput": _PlanColumn(
        lambda c: _figure(c["goodput"]), lambda best: best["goodput"] < GOODPUT_DIFFERS * best["samples_per_s"]
    ),
    "$/h": _PlanColumn(lambda c: f"{c['usd_per_hour']:,.2f}"),
    "$ per\nmillion": _PlanColumn(lambda c: _usd(c["usd_per_million_samples"])),
    "hours": _PlanColumn(lambda c: _figure(c["hours"]), lambda best: best["hours"] is not None),
    "$": _PlanColumn(lambda c: _usd(c["usd"]), lambda best: best["usd"] is not None),
}
