"""``offload runs``, which lists the runs of a Ray cluster, and pauses, resumes, stops or resizes one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from offload import runs as steering
from offload.cli.output import stdout_for_json
from offload.formatting import duration
from offload.runs import RunState

_COLUMNS = ("NAME", "USER", "SINCE", "STATE", "WORKERS", "CORES", "GOODPUT", "WHY")
_address = click.option(
    "--address",
    metavar="HOST:PORT",
    help='A Ray cluster ("auto": RAY_ADDRESS, or else this host\'s). Default: auto.',
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
_timeout = click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.0, min_open=True),
    default=steering.PATIENCE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the run's answer. It obeys later, too.",
)


@click.group(invoke_without_command=True)
@_address
@_json
@click.pass_context
def runs(ctx: click.Context, address: str | None, as_json: bool) -> None:
    """List the runs of a Ray cluster, or steer one by its name.

    The list says of each run who started it, how long ago, what it does, its workers and preprocessing cores, its goodput, and why it
    waits:

        offload runs --address 10.0.0.1:6379

        offload runs pause vit        # commits, and gives back everything; its program waits

        offload runs resume vit       # goes on where it has committed

        offload runs resize vit 2     # commits, and goes on with two workers

        offload runs stop vit         # commits, and ends

    Exit codes: 0 done, 2 no such run or cluster, or the run refuses or does not answer in time.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = address, as_json
        return
    with stdout_for_json(as_json) as emit:
        listed = steering.listed(address)
        document = {"schema": "offload.runs/1", "runs": [dataclasses.asdict(run) for run in listed]}
        emit(document, table(listed, time.time()))


def table(listed: Sequence[RunState], now: float) -> str:
    """The runs as lines with columns. ``now``: in seconds since 1970."""
    if not listed:
        return "no run trains or waits on this Ray cluster."
    rows = [_COLUMNS, *(_row(run, now) for run in listed)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(run: RunState, now: float) -> tuple[str, ...]:
    goodput = "-" if run.goodput is None else f"{run.goodput:,.1f}/s"
    since = duration(max(now - run.since, 0.0))
    who = f"{run.user}@{run.host}"
    return run.name, who, since, run.state, str(run.workers), str(run.cores), goodput, run.reason


def _asks(command: Any) -> Any:
    """A command with the argument and the options of all that steer a run."""
    for parameter in (_timeout, _json, _address):
        command = parameter(command)
    return runs.command()(click.argument("name")(command))


@_asks
def pause(name: str, **common: Any) -> None:
    """Let run NAME commit and give back everything that it holds. Its program waits until somebody resumes it."""
    _ask(steering.pause, name, **common)


@_asks
def resume(name: str, **common: Any) -> None:
    """Let the paused run NAME go on where it has committed."""
    _ask(steering.resume, name, **common)


@_asks
def stop(name: str, **common: Any) -> None:
    """Let run NAME commit and end. The same command as before resumes it later."""
    _ask(steering.stop, name, **common)


@_asks
@click.argument("workers", type=int)
def resize(name: str, workers: int, **common: Any) -> None:
    """Let run NAME commit and go on with this many WORKERS. They stay until somebody chooses anew."""
    _ask(steering.resize, name, workers, **common)


def _ask(
    command: Callable[..., str], name: str, *arguments: int, address: str | None, as_json: bool, timeout_s: float
) -> None:
    of_group = click.get_current_context().obj or (None, False)
    with stdout_for_json(as_json or of_group[1]) as emit:
        answer = command(name, *arguments, address or of_group[0], timeout_s=timeout_s)
        emit({"schema": "offload.answer/1", "run": name, "answer": answer}, f"{name}: {answer}.")
