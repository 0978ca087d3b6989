"""``offload arbiter``, which shares a Ray cluster among its runs: start it, look at it, stop it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from offload import arbiter as sharing
from offload.arbiter.page import status_page
from offload.arbiter.text import status_text
from offload.cli.output import stdout_for_json
from offload.errors import ConfigError
from offload.model.allocation.values import Rules

_DEFAULTS = Rules()
_address = click.option(
    "--address",
    metavar="HOST:PORT",
    help='A Ray cluster ("auto": RAY_ADDRESS, or else this host\'s). Default: auto.',
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


@click.group()
def arbiter() -> None:
    """Share a Ray cluster among its runs by their joint goodput.

    One arbiter on the head node follows the runs, and says which workers and preprocessing cores each may hold:

        offload arbiter start --address 10.0.0.1:6379

        offload arbiter status        # who has what and why, and what more would bring

        offload arbiter stop          # runs keep what they hold

    Exit codes: 0 done, 2 no such cluster, no arbiter there, or one that runs already.
    """


@arbiter.command()
@click.option(
    "--fairness",
    type=float,
    default=_DEFAULTS.fairness,
    show_default=True,
    metavar="P",
    help="The exponent of the mean of speedups that it maximises, from -20 to 1. 1: the sum, whoever it goes to. Lower: fairer.",
)
@click.option(
    "--shorter-first",
    type=float,
    default=_DEFAULTS.shorter_first,
    show_default=True,
    metavar="E",
    help="How much more runs count that end sooner, from 0 to 1: by the power E of the time that they have left.",
)
@click.option(
    "--growth",
    type=float,
    default=_DEFAULTS.growth,
    show_default=True,
    metavar="FACTOR",
    help="A run may outgrow the workers that it was measured with by this factor.",
)
@click.option(
    "--first-cores",
    type=int,
    default=_DEFAULTS.first_cores,
    show_default=True,
    metavar="CORES",
    help="Preprocessing cores for each worker of a run that was not measured yet, beside those that nobody needs.",
)
@click.option("--network-gbps", type=float, metavar="GBPS", help="The network of one node. Default: no limit.")
@click.option(
    "--usd-per-hour",
    type=float,
    metavar="USD",
    help="The most that all runs together may cost an hour. Default: no limit.",
)
@click.option(
    "--usd-per-gpu-hour",
    multiple=True,
    metavar="KIND=USD",
    help="The price of one GPU of a kind, such as A100=3.2, for --usd-per-hour. Repeat it for several kinds.",
)
@click.option(
    "--usd-per-core-hour",
    type=float,
    default=_DEFAULTS.usd_per_core_hour,
    show_default=True,
    metavar="USD",
    help="The price of one core, for --usd-per-hour.",
)
@_address
@_json
def start(address: str | None, as_json: bool, usd_per_gpu_hour: tuple[str, ...], **rules: Any) -> None:
    """Start the arbiter of a Ray cluster. It runs until somebody stops it."""
    with stdout_for_json(as_json) as emit:
        sharing.start(address, Rules(usd_per_gpu_hour=_prices(usd_per_gpu_hour), **rules))
        emit(
            {"schema": "offload.arbiter/1", "answer": "started"},
            "the arbiter has started. Runs with an arbiter share the cluster from now on: offload arbiter status shows them.",
        )


@arbiter.command()
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write an HTML page, with a lane for each run over time.",
)
@_address
@_json
def status(address: str | None, as_json: bool, page: Path | None) -> None:
    """Show who has what and why, who waits for what, and what each run would do with more."""
    with stdout_for_json(as_json) as emit:
        seen = sharing.status(address)
        text = status_text(seen)
        if page is not None:
            try:
                page.write_text(status_page(seen), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"the page cannot be written to {page}: {error.strerror}. Pass a file in a folder that exists and is yours to write to."
                ) from None
            text += f"\n\nwrote {page}"
        emit({"schema": "offload.arbiter/1", **dataclasses.asdict(seen)}, text)


@arbiter.command()
@_address
@_json
def stop(address: str | None, as_json: bool) -> None:
    """Stop the arbiter of a Ray cluster. The runs keep what they hold."""
    with stdout_for_json(as_json) as emit:
        sharing.stop(address)
        emit(
            {"schema": "offload.arbiter/1", "answer": "stopped"},
            "the arbiter has stopped. The runs keep what they hold.",
        )


def _prices(texts: tuple[str, ...]) -> dict[str, float]:
    prices = {}
    for text in texts:
        kind, _, price = text.rpartition("=")
        try:
            prices[kind] = float(price)
        except ValueError:
            kind = ""
        if not kind:
            raise ConfigError(
                f"--usd-per-gpu-hour must be a kind of GPU and its price, such as A100=3.2, found {text!r}."
            )
    return prices
