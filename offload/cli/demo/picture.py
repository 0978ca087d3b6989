"""The demo's comparison as a picture: bars and a sentence on the terminal, and a page beside the run's report."""

from __future__ import annotations

import dataclasses
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import click
import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Table as Rows

from offload.cli.demo.comparison import Comparison, Side, compare
from offload.errors import RunError
from offload.formatting import count, figure, share, times
from offload.paced import PacedAccelerator
from offload.prices import built_in
from offload.report.page.charts.chart import Chart, ChartLine, time_axis, value_axis
from offload.report.page.charts.pictures import draw_chart
from offload.report.page.html import rendered
from offload.report.page.page_view import page_of
from offload.report.page.records import read_run
from offload.report.page.tables import Table
from offload.report.run_dir import to_json

NAME = "comparison"
LEAST_GAIN = 1.05  # below it, noise could be the gain
BUSY = 0.8  # of a core for a process, below which others compete; the loop itself takes some of it
WIDTH = 100
EMULATED = "Emulation: one machine stands for a GPU host and a CPU host, so that no network lies between them."


def compare_and_show(images: Path, console: Console) -> Callable[[Path], tuple[dict[str, Any], str]]:
    """Compare, and print the picture. Return a function of a run's directory that writes the page there, and returns fields for the run's
    document and the last line of the demo."""
    comparison = compare(images, console)
    if comparison is None:
        click.echo("This machine has one core, so that there is nothing to offload to.")
        return lambda run_dir: ({NAME: None}, "")
    terminal = sys.stdout.isatty()
    click.echo(
        f"\n{words(comparison, width=shutil.get_terminal_size().columns if terminal else WIDTH, colors=terminal)}\n"
    )
    place = "; a CPU core computes in a GPU's place, and is the bottleneck" if _is_paced(comparison.alone) else ""
    console.print(f"training a small ResNet on the same images{place}", soft_wrap=True)
    return lambda run_dir: ({NAME: comparison.document()}, f"side by side: {write(run_dir, comparison)}")


def words(comparison: Comparison, *, width: int = WIDTH, colors: bool = False) -> str:
    """The bars, and below them what offloading brought, in a sentence. ``width``: columns of the terminal."""
    alone, offloaded = comparison.alone, comparison.offloaded
    rates = (
        (f"{alone.name}, {count(alone.cores, 'core')}", alone.samples_per_s, "blue"),
        ("predicted for offload", comparison.predicted_samples_per_s, "bright_black"),
        (f"{offloaded.name}, {count(offloaded.cores, 'core')}", offloaded.samples_per_s, "green"),
    )
    most = max(rate for _, rate, _ in rates)
    rows = Rows(box=None, show_header=False, pad_edge=False, expand=True)
    rows.add_column(no_wrap=True)
    rows.add_column(ratio=1)
    rows.add_column(justify="right", no_wrap=True)
    for name, rate, color in rates:
        rows.add_row(name, Bar(most, 0, rate, color=color), figure(rate))
    out = io.StringIO()
    console = Console(
        file=out,
        width=min(width, WIDTH),
        force_terminal=colors,
        force_jupyter=False,
        no_color=None if colors else True,
        highlight=False,
    )
    console.print(rows)
    bars = "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
    text = [_sentence(comparison), _stands(alone)]
    if comparison.core_share < BUSY:
        taken = share(1 - comparison.core_share)
        text.append(
            f"Other programs had {taken} of the cores while the prediction was measured, so that these rates are rough."
        )
    return "\n".join(["images/s of the same loop", bars, "", *(fill(part, min(width, WIDTH)) for part in text)])


def _sentence(comparison: Comparison) -> str:
    alone, offloaded, gain = comparison.alone, comparison.offloaded, comparison.gain
    brought = f"{times(gain)} the rate" if gain >= LEAST_GAIN else f"no gain on this machine, {times(gain)} the rate"
    return (
        f"{figure(alone.samples_per_s)} images/s on the GPU host's {count(alone.cores, 'core')} alone, "
        f"{figure(offloaded.samples_per_s)} with the rest of the {offloaded.cores} cores: {brought}. "
        f"The model had predicted {figure(comparison.predicted_samples_per_s)} beforehand."
    )


def _stands(side: Side) -> str:
    """What is emulated."""
    paced = f" A {side.device} stands in for a GPU: it takes time and computes nothing." if _is_paced(side) else ""
    return f"{EMULATED}{paced}"


def _is_paced(side: Side) -> bool:
    return side.device.startswith(PacedAccelerator.name)


def write(run_dir: Path, comparison: Comparison) -> Path:
    """Write the page, the picture and the numbers beside the run's report; return the page's path. Raises RunError if a file cannot be
    written."""
    chart = chart_of(comparison)
    own = page_of([read_run(run_dir)], built_in(), {})
    page = dataclasses.replace(
        own, title="Demo: a DataLoader, and offloaded", comparison=_table(comparison), together=(chart,)
    )
    path = run_dir / f"{NAME}.html"
    try:
        path.write_text(rendered(page), encoding="utf-8")
        draw_chart(chart, run_dir / f"{NAME}.png")
        (run_dir / f"{NAME}.json").write_text(to_json(comparison.document(), indent=2) + "\n")
    except OSError as error:
        raise RunError(f"the comparison cannot be written to {run_dir}: {error.strerror or error}.") from None
    return path


def chart_of(comparison: Comparison) -> Chart:
    """The rates of both over time, and the predicted one."""
    alone, offloaded, predicted = comparison.alone, comparison.offloaded, comparison.predicted_samples_per_s
    end = max(alone.at[-1], offloaded.at[-1])
    lines = [
        _line(alone, "other"),
        _line(offloaded, "a"),
        ChartLine(name="predicted for offload", role="a", x=(0.0, end), y=(predicted, predicted), dash=True),
    ]
    return Chart(
        key=NAME,
        title="The same loop with two loaders, emulated on one machine",
        reading=f"Higher is faster. {_stands(alone)}",
        x=time_axis(end),
        y=value_axis("images/s", lines, log=False),
        lines=tuple(lines),
        tall=True,
    )


def _line(side: Side, role: str) -> ChartLine:
    """The rate in each whole second."""
    edges = np.arange(0.0, max(int(side.at[-1]), 1) + 1.0)
    rates, _ = np.histogram(side.at, bins=edges, weights=side.samples)
    middles = (edges[:-1] + edges[1:]) / 2
    name = f"{side.name}, {count(side.cores, 'core')}"
    return ChartLine(name=name, role=role, x=tuple(map(float, middles)), y=tuple(map(float, rates)))


def _table(comparison: Comparison) -> Table:
    rows = [
        (
            side.name,
            str(side.cores),
            figure(side.samples_per_s),
            predicted,
            share(side.stall),
            speed_up,
        )
        for side, predicted, speed_up in (
            (comparison.alone, "–", "reference"),
            (comparison.offloaded, figure(comparison.predicted_samples_per_s), times(comparison.gain)),
        )
    ]
    return Table(
        head=("loader", "cores", "images/s", "predicted", "waiting for data", "speed-up"),
        rows=tuple(rows),
        numeric=(1, 2, 3, 4, 5),
        note=f"Device: {comparison.alone.device}. {EMULATED} The run below trained afterwards, with all cores.",
    )
