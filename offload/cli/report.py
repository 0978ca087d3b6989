"""``offload report``, which shows one or several runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from offload.cli.output import stdout_for_json
from offload.errors import ConfigError
from offload.model.checks import check_number
from offload.prices import load_catalog
from offload.report.page.html import rendered
from offload.report.page.page_view import document_of, page_of
from offload.report.page.records import read_run
from offload.report.run_dir import REPORT

SEVERAL = "offload-report.html"


class Price(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """``NAME=USD``: the price of an instance type, or of a node by its name."""

    name = "NAME=USD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, equals, usd = str(value).rpartition("=")
        try:
            if not (name and equals):
                raise ValueError
            return name, check_number("usd_per_hour", float(usd), above=0.0, most=1e6)
        except (ValueError, ConfigError):
            self.fail(
                f"{value!r} is no price: expected a name and dollars per hour, such as ml.g5.xlarge=1.40.", param, ctx
            )


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"The page (default: {REPORT} in the run directory; of several runs {SEVERAL}).",
)
@click.option("--png", type=click.Path(path_type=Path), metavar="FOLDER", help="Also write each chart as a picture.")
@click.option("--catalog", type=click.Path(path_type=Path), metavar="FILE", help="Node types of your own, with prices.")
@click.option(
    "--usd-per-hour",
    "prices",
    type=Price(),
    multiple=True,
    help="The price of an instance type, or of a node by its name. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON document on stdout.")
def report(
    run_dirs: tuple[Path, ...],
    output: Path | None,
    png: Path | None,
    catalog: Path | None,
    prices: tuple[tuple[str, float], ...],
    as_json: bool,
) -> None:
    """Write a page about a run, or about several side by side.

    The page says what the bottleneck was, what to do next and what that would bring, and shows rates, decisions, nodes, metrics, cost
    and faults. It is one file and opens without a network. offload's page "The report of a run" says what
    high and low mean.

        offload report runs/a runs/b -o comparison.html --png pictures

    A run that still trains, or has crashed, has a page too. Exit codes: 0 success, 2 no such run, or a file that cannot be written.
    """
    with stdout_for_json(as_json) as emit:
        _check_twice(run_dirs)
        known, own_prices = load_catalog(catalog), dict(prices)
        records = [read_run(path) for path in run_dirs]
        page = page_of(records, known, own_prices)
        path = output or (records[0].path / REPORT if len(records) == 1 else Path(SEVERAL))
        _write(path, rendered(page))
        pictures = []
        if png is not None:
            from offload.report.page.charts.pictures import draw_page

            try:
                pictures = draw_page(page, png)
            except OSError as error:
                raise ConfigError(
                    f"the pictures cannot be written to {png}: {error.strerror}. Choose another --png."
                ) from None
        document = document_of(page, records, known, own_prices)
        document |= {"report": str(path), "pictures": [str(picture) for picture in pictures]}
        said = [line for run in page.runs for line in _said(run.name if len(page.runs) > 1 else "", run)]
        if pictures:
            said.append(f"pictures: {len(pictures)} in {png}")
        emit(document, "\n".join([*said, f"report: {path}"]))


def _said(name: str, run: Any) -> list[str]:
    """The verdict of a run; with ``name``, below it."""
    failed = f"The run failed: {run.error or 'without a word'}." if run.status == "failed" else ""
    lines = [failed, *run.notes, run.verdict, run.following, run.alone]
    return [*([f"{name}:"] if name else []), *(line for line in lines if line), ""]


def _check_twice(run_dirs: tuple[Path, ...]) -> None:
    seen = set()
    for path in run_dirs:
        try:
            where = path.expanduser().resolve()
        except (OSError, RuntimeError, ValueError):
            continue  # reading it raises the right error
        if where in seen:
            raise ConfigError(f"the run directory {path} is given twice. Name each run once.")
        seen.add(where)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {path}: {error.strerror}. Choose another place with -o."
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the report cannot be written to {str(path)!r}: {error}. Choose another place with -o."
        ) from None
