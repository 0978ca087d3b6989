"""The state of a watched run for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offload.report.page.watched import Watched


def screen(state: Watched) -> RenderableType:
    """The state as panels, from the most important one down: a small terminal cuts the lower ones."""
    panels: list[RenderableType] = [
        Panel(_rows(state.facts), title=f"{state.name}: {state.status}", title_align="left")
    ]
    if state.warning:
        panels.append(Text(state.warning, style="yellow"))
    for title, lines in (("errors", state.errors), ("decisions", state.decisions)):
        if lines:
            text = Text("\n".join(lines), no_wrap=title == "decisions", overflow="ellipsis")
            panels.append(Panel(text, title=title, title_align="left"))
    panels.append(Panel(_rows(state.nodes), title="nodes", title_align="left"))
    return Group(*panels)


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
