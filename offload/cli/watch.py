"""``offload watch``, which shows a run while it trains."""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from offload.cli.output import stdout_for_json
from offload.interrupts import INTERRUPTED
from offload.prices import load_catalog
from offload.report.page.records import read_run
from offload.report.page.story import Story
from offload.report.page.watched import Watched, watched
from offload.report.watch_screen import plain, screen

EVERY_S = 2.0
PLAIN_EVERY_S = 10.0


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the present state as one JSON document on stdout, and end."
)
def watch(run_dir: Path, as_json: bool) -> None:
    """Show a run while it trains: rates and both ceilings, nodes, decisions, last checkpoint, cost and errors.

    It reads the run directory and ends with the run. Without a terminal it prints a line every ten seconds. Ctrl-C ends this view
    and leaves the run alone.

    Exit codes: 0 the run has ended, 130 interrupted, 2 no such run.
    """
    with stdout_for_json(as_json) as emit:
        state = _state(run_dir)
        if as_json:
            emit({"schema": "offload.watch/1", **dataclasses.asdict(state)}, "")
            return
    try:
        _follow(run_dir, state)
    except KeyboardInterrupt:
        click.echo("offload: the view has ended; the run goes on.", err=True)
        sys.exit(INTERRUPTED)


def _follow(run_dir: Path, state: Watched) -> None:
    console = Console(highlight=False)
    live = Live(screen(state), console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        while state.status == "unfinished":
            if live is None:
                console.print(plain(state), soft_wrap=True, markup=False)
            else:
                live.update(screen(state), refresh=True)
            time.sleep(EVERY_S if live is not None else PLAIN_EVERY_S)
            state = _state(run_dir)
    console.print(screen(state) if live is not None else plain(state), soft_wrap=live is None, markup=False)


def _state(run_dir: Path) -> Watched:
    return watched(Story(read_run(run_dir), load_catalog(None), {}), time.time())
