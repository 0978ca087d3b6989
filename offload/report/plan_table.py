"""A plan as people read it: the candidates worth a look, with the recommended one and the single instance marked."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN = 12
MARKS = {"recommended": "→", "baseline": "="}


def format_plan(document: dict[str, Any], *, shown: int = SHOWN, width: int = 120) -> str:
    """The table, the explanation and the warnings as text. At most ``shown`` rows and the two that are marked."""
    candidates = document["candidates"]
    marked = {document["baseline"]: MARKS["baseline"], document["recommended"]: MARKS["recommended"]}
    rows = sorted({*range(min(shown, len(candidates))), *marked})
    timed = candidates[document["recommended"]]["usd"] is not None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("nodes", no_wrap=True)
    for name in ("workers × batch × micro", "samples/s (95 %)", "stall", "binds", "goodput", "$/h", "$/million"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("hours", "$") if timed else ():
        table.add_column(name, justify="right", no_wrap=True)
    for at in rows:
        one = candidates[at]
        nodes = " + ".join(f"{count} × {kind}" for kind, count in one["shape"].items())
        cells = [
            marked.get(at, ""),
            nodes,
            f"{one['workers']} × {one['local_batch_size']} × {one['accum_steps'] + 1}",
            f"{_figure(one['samples_per_s'])} ({_figure(one['samples_per_s_low'])}–{_figure(one['samples_per_s_high'])})",
            f"{one['stall']:.0%}",
            one["bottleneck"],
            _figure(one["goodput"]),
            f"{one['usd_per_hour']:,.2f}",
            _usd(one["usd_per_million_samples"]),
        ]
        if timed:
            cells += [_figure(one["hours"]), _usd(one["usd"])]
        style = "bold" if at == document["recommended"] else None
        table.add_row(*(Text(cell) for cell in cells), style=style)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    console.print(table)
    left = len(candidates) - len(rows)
    said = [f"{MARKS['recommended']} recommended, {MARKS['baseline']} the single instance"]
    if left:
        said.append(f"{left:,} more candidates in --json")
    console.print("; ".join(said), soft_wrap=True)
    console.print(Text("\n" + document["explanation"]), soft_wrap=True)
    for warning in document["warnings"]:
        console.print(Text(f"Warning: {warning}"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
