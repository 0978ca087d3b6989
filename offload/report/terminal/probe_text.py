"""The text of a profile: the verdict, and the cost of each stage of preprocessing."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def format_probe(document: dict[str, Any], *, width: int = 110) -> str:
    """The stages as a table, and the verdict below it."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False, highlight=False)
    title = Text(f"offload probe {document['workload']}")  # a path may hold [brackets]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("stage", style="bold", no_wrap=True)
    for name in ("core-ms a sample", "share", "kB out"):
        table.add_column(name, justify="right")
    total = document["input"]["core_seconds_per_sample"]
    for stage in sorted(document["input"]["stages"], key=lambda stage: -stage["core_seconds_per_sample"]):
        spent, size = stage["core_seconds_per_sample"], stage["bytes_out"]
        table.add_row(
            Text(stage["name"]),
            f"{spent * 1000:,.3g}",
            f"{spent / total:.0%}",
            "" if size is None else f"{size / 1000:,.1f}",
        )
    wire = document["input"]["wire_bytes_per_sample"] / 1000
    table.add_row("together", f"{total * 1000:,.3g}", "", f"{wire:,.1f}")
    console.print(table)
    console.print()
    for sentence in document["verdict"]:
        console.print(Text(sentence), soft_wrap=True)
    seconds = document["measured"].get("seconds")
    if seconds:
        console.print(Text(f"Measured in {seconds:.0f} s."), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
