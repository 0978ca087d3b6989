"""The state of a watched run for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offload.report.page.watched import Watched


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
