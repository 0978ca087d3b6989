"""The demo's comparison: the same loop with torch's DataLoader on the GPU host's share of this machine's cores, then offloaded to all.

It emulates two hosts with one: some cores stand for the GPU host, the rest for a CPU host beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offload.errors import RunError
from offload.formatting import figure, share
from offload.machine import usable_cores
from offload.prices import built_in
from offload.report.page.charts.chart import Chart, ChartLine, time_axis, value_axis
from offload.report.page.charts.pictures import draw_chart
from offload.report.page.html import rendered
from offload.report.page.page_view import page_of
from offload.report.page.records import read_run
from offload.report.page.tables import Table
from offload.report.run_dir import to_json
from offload.report.terminal.live_line import stderr_console

NAME = "comparison"
SECONDS = 10.0
DEADLINE_S = 180.0
HOST_SHARE = 4  # an ml.g5.xlarge has 4 of the 20 vCPUs of itself and an ml.c5.4xlarge
LEAST_GAIN = 1.05  # below it, noise could be the gain
EMULATED = "Emulation: one machine stands for a GPU host and a CPU host, so that no network lies between them."


@dataclass(frozen=True, kw_only=True)
class Side:
    """The loop with one loader: its ``cores``, and per step the seconds since the first batch and the samples."""

    name: str
    cores: int
    device: str
    at: list[float]
    samples: list[int]
    waited_s: float

    @property
    def samples_per_s(self) -> float:
        """The mean rate after the first batch."""
        return sum(self.samples) / self.at[-1]

    @property
    def stall(self) -> float:
        """The share of the time in which the loop waited for a batch."""
        return self.waited_s / self.at[-1]


def host_cores(cores: int) -> int:
    """The cores that stand for the GPU host: a quarter, at least one."""
    return max(cores // HOST_SHARE, 1)


def side_by_side(images: Path, run_dir: Path, *, quiet: bool) -> tuple[dict[str, Any], str]:
    """Compare, and write the page beside the run's report. Return fields for the run's document, and the last lines of the demo."""
    stderr_console(quiet=quiet).print("comparing a DataLoader with offload.DataLoader, which takes about half a minute")
    sides = compare(images)
    if sides is None:
        return {NAME: None}, "This machine has one core, so that there is nothing to offload to."
    path = write(run_dir, *sides)
    return {NAME: document_of(*sides)}, f"{words(*sides)}\nside by side: {path}"


def compare(images: Path, *, seconds: float = SECONDS) -> tuple[Side, Side] | None:
    """Run the loop with each loader on the images in ``images``; None on a machine with one core. Raises RunError if one fails."""
    cores = usable_cores()
    if cores < 2:
        return None
    mine = host_cores(cores)
    all_cores = sorted(os.sched_getaffinity(0))
    alone = _side("torch", images, seconds, mine, all_cores[:mine])
    offloaded = _side("offload", images, seconds, cores, all_cores)
    return (
        Side(name="torch DataLoader", cores=mine, **alone),
        Side(name="offload", cores=cores, **offloaded),
    )


def _side(loader: str, images: Path, seconds: float, cores: int, allowed: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="offload-demo-") as folder:
        file = Path(folder) / "measured.json"
        words = (loader, str(images), str(seconds), str(cores), ",".join(map(str, allowed)), str(file))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "offload.cli.demo.side", *words],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the demo has trained, but its comparison ({loader}) took longer than {DEADLINE_S:.0f} s. Leave it out with --no-compare."
            ) from None
        # The file is whole or absent. Ray may still fail while it ends, after the last batch.
        if not file.exists():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RunError(
                f"the demo has trained, but its comparison ({loader}) failed: {last}. Leave it out with --no-compare."
            )
        measured: dict[str, Any] = json.loads(file.read_text())
        return measured


def words(alone: Side, offloaded: Side) -> str:
    """What offloading brought, in a few lines."""
    gain = offloaded.samples_per_s / alone.samples_per_s
    if gain >= LEAST_GAIN:
        brought = f"Offloading made this loop {gain:.2f} times as fast on this machine."
    else:
        brought = f"Offloading did not make this loop faster on this machine ({gain:.2f} times the rate)."
    return "\n".join(
        [
            f"The same loop with two loaders ({alone.device}):",
            f"  {_said(alone)} on {_cores(alone.cores)} of {offloaded.cores}, the GPU host's share",
            f"  {_said(offloaded)} on all {offloaded.cores} cores",
            brought,
            EMULATED,
        ]
    )


def _said(side: Side) -> str:
    return f"{side.name}: {figure(side.samples_per_s)} images/s, {share(side.stall)} of the time waiting for data,"


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def document_of(alone: Side, offloaded: Side) -> dict[str, Any]:
    """The comparison as numbers: rates in images/s, stalls as shares of the time."""
    sides = [
        {
            "loader": side.name,
            "cores": side.cores,
            "samples_per_s": side.samples_per_s,
            "stall": side.stall,
            "seconds": side.at[-1],
        }
        for side in (alone, offloaded)
    ]
    return {"device": alone.device, "emulated": True, "sides": sides}


def write(run_dir: Path, alone: Side, offloaded: Side) -> Path:
    """Write the page, the picture and the numbers beside the run's report; return the page's path."""
    chart = chart_of(alone, offloaded)
    own = page_of([read_run(run_dir)], built_in(), {})
    page = dataclasses.replace(
        own, title="Demo: a DataLoader, and offloaded", comparison=_table(alone, offloaded), together=(chart,)
    )
    path = run_dir / f"{NAME}.html"
    try:
        path.write_text(rendered(page), encoding="utf-8")
        draw_chart(chart, run_dir / f"{NAME}.png")
        (run_dir / f"{NAME}.json").write_text(to_json(document_of(alone, offloaded), indent=2) + "\n")
    except OSError as error:
        raise RunError(f"the comparison cannot be written to {run_dir}: {error.strerror or error}.") from None
    return path


def chart_of(alone: Side, offloaded: Side) -> Chart:
    """The rates of both over time."""
    lines = [_line(alone, "other"), _line(offloaded, "a")]
    return Chart(
        key=NAME,
        title=f"The same loop with two loaders, emulated on one machine ({alone.device})",
        reading=f"Higher is faster. {EMULATED}",
        x=time_axis(max(alone.at[-1], offloaded.at[-1])),
        y=value_axis("images/s", lines, log=False),
        lines=tuple(lines),
        tall=True,
    )


def _line(side: Side, role: str) -> ChartLine:
    """The rate in each whole second."""
    edges = np.arange(0.0, max(int(side.at[-1]), 1) + 1.0)
    rates, _ = np.histogram(side.at, bins=edges, weights=side.samples)
    middles = (edges[:-1] + edges[1:]) / 2
    name = f"{side.name}, {_cores(side.cores)}"
    return ChartLine(name=name, role=role, x=tuple(map(float, middles)), y=tuple(map(float, rates)))


def _table(alone: Side, offloaded: Side) -> Table:
    rows = [
        (
            side.name,
            str(side.cores),
            figure(side.samples_per_s),
            share(side.stall),
            "reference" if side is alone else f"{side.samples_per_s / alone.samples_per_s:.2f}×",
        )
        for side in (alone, offloaded)
    ]
    return Table(
        head=("loader", "cores", "images/s", "waiting for data", "speed-up"),
        rows=tuple(rows),
        numeric=(1, 2, 3, 4),
        note=f"Device: {alone.device}. {EMULATED} The run below trained before, with all cores.",
    )
