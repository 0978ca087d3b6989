"""``offload watch``, which shows a run while it trains."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from offload.cli.output import Emit, said_document, stdout_for_json
from offload.errors import ConfigError, argument
from offload.prices import load_catalog
from offload.process.interrupts import INTERRUPTED
from offload.report.page.records import RunReader, check_run_dir
from offload.report.page.story import Story
from offload.report.run_tail import RunOverError
from offload.report.terminal.watched import Watched, plain, screen, watched

EVERY_S = 2.0
PLAIN_EVERY_S = 10.0


@click.command()
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option(
    "--address",
    metavar="HOST:PORT",
    help='A Ray cluster ("auto": RAY_ADDRESS, or else this host\'s), instead of RUN_DIR: its run is shown.',
)
@click.option("--run", "name", metavar="NAME", help="With --address: which run, if several train there.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the present state as one JSON document on stdout, and end."
)
def watch(run_dir: Path | None, address: str | None, name: str | None, as_json: bool) -> None:
    """Show a run while it trains: rates and both ceilings, nodes, decisions, last checkpoint, cost and errors.

    It reads the run directory, or asks the cluster, and ends with the run. Without a terminal it prints a line every ten seconds.
    Ctrl-C ends this view and leaves the run alone.

    Exit codes: 0 the run has ended, 130 interrupted, 2 no such run.
    """
    try:
        with stdout_for_json(as_json) as emit:
            try:
                _show(run_dir, address, name, emit if as_json else None)
            except RunOverError as over:
                click.echo(f"offload: {over}", err=True)
                if as_json:
                    emit(said_document(str(over), 0), "")
    except KeyboardInterrupt:
        click.echo("offload: the view has ended; the run goes on.", err=True)
        sys.exit(INTERRUPTED)


def _show(run_dir: Path | None, address: str | None, name: str | None, emit: Emit | None) -> None:
    """Show the run until it ends; with ``emit``, print its present state alone."""
    catalog = load_catalog(None)
    with _reader(run_dir, address, name) as reader:

        def state() -> Watched:
            return watched(Story(reader.read(), catalog, {}), time.time())

        first = state()
        if emit is not None:
            emit({"schema": "offload.watch/1", **dataclasses.asdict(first)}, "")
        else:
            _follow(state, first)


@contextmanager
def _reader(run_dir: Path | None, address: str | None, name: str | None) -> Iterator[RunReader]:
    """A reader of the run that the user names."""
    if (run_dir is None) == (address is None):
        raise ConfigError(
            f"name either the folder of a run, such as runs/demo, or {argument('address', 'HOST:PORT')} of the Ray cluster on which "
            "it trains."
        )
    if address is None:
        if name is not None:
            raise ConfigError(f"{argument('run', name)} chooses among the runs of a cluster: pass its address, too.")
        assert run_dir is not None
        yield RunReader(check_run_dir(run_dir))
        return
    from offload.train.hub.view import reader_on

    with reader_on(address, name) as reader:
        yield reader


def _follow(read: Callable[[], Watched], state: Watched) -> None:
    console = Console(highlight=False)
    live = Live(screen(state), console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        while state.status == "unfinished":
            if live is None:
                console.print(plain(state), soft_wrap=True, markup=False)
            else:
                live.update(screen(state), refresh=True)
            time.sleep(EVERY_S if live is not None else PLAIN_EVERY_S)
            state = read()
    console.print(screen(state) if live is not None else plain(state), soft_wrap=live is None, markup=False)
