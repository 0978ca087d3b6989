"""Probe, plan and report from Python, with results that a notebook shows as tables and charts.

``offload probe``, ``offload plan`` and ``offload report`` do the same for scripts and run directories, and have more options. What a
notebook's cells define, data sets, transforms and the training function, travels to other processes by value.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from offload.errors import ConfigError
from offload.files import read_json, write_text
from offload.measure.findings import profile_document
from offload.model.checks import check_number, check_text, shown
from offload.model.planning.planner import plan as make_plan
from offload.model.profile import Profile
from offload.prices import load_catalog
from offload.probe import profile_age
from offload.probe.profile_age import check_usable
from offload.report.page.charts.chart import Chart
from offload.report.page.charts.pictures import draw_chart
from offload.report.page.charts.plan_chart import draw_plan
from offload.report.page.html import rendered
from offload.report.page.page_view import PageView, page_of
from offload.report.page.records import read_run
from offload.report.run_dir import to_json
from offload.report.terminal.plan_table import format_plan
from offload.report.terminal.probe_text import format_probe
from offload.train.driver.platform.choice import check_address
from offload.train.driver.trainer import Trainer

__all__ = ["PlanResult", "ProbeResult", "ReportResult", "plan", "probe", "report"]

LEAST_S = 5.0  # shortest probe: a shorter one leaves too few steps and samples for a range


@dataclass(frozen=True, kw_only=True, repr=False)
class ProbeResult:
    """The result of :func:`probe`. A notebook shows the cost of each stage and the bottleneck.

    Attributes:
        document: the content of ``profile.json``.
    """

    document: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write ``profile.json``, for ``offload plan --profile``. Raises ConfigError if it cannot be written."""
        write_text(Path(path), to_json(self.document, indent=2) + "\n")

    def __repr__(self) -> str:
        return format_probe(self.document)


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanResult:
    """The result of :func:`plan`. A notebook shows the table, and samples/s and cost against the number of CPU nodes.

    Attributes:
        document: the content of ``plan.json``.
    """

    document: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write ``plan.json``, for ``offload plan --plan`` and ``offload launch``. Raises ConfigError if it cannot be written."""
        write_text(Path(path), to_json(self.document, indent=2) + "\n")

    def __repr__(self) -> str:
        return format_plan(self.document)

    def _repr_html_(self) -> str:
        file = io.BytesIO()
        draw_plan(self.document, file)
        return f"<pre>{html.escape(repr(self))}</pre>{_picture(file, 'samples/s and cost against CPU nodes')}"


@dataclass(frozen=True, kw_only=True, repr=False)
class ReportResult:
    """The result of :func:`report`. A notebook shows the verdict of each run and the charts of throughput, busy shares and steps; with
    several runs, also the throughput of all. :meth:`save` writes the whole page."""

    _page: PageView

    def save(self, path: str | Path) -> None:
        """Write the page, which opens without a network. Raises ConfigError if it cannot be written."""
        write_text(Path(path), rendered(self._page))

    def __repr__(self) -> str:
        return "\n\n".join("\n".join([f"{run.name}: {run.status}", *lines]) for run, lines in self._said())

    def _repr_html_(self) -> str:
        parts = [_chart(chart) for chart in self._page.together]
        for run, lines in self._said():
            parts.append(f"<h4>{html.escape(run.name)}: {html.escape(run.status)}</h4>")
            parts += [f"<p>{html.escape(line)}</p>" for line in lines]
            parts += [_chart(chart) for chart in (run.throughput, run.busy, run.step) if chart is not None]
        return "".join(parts)

    def _said(self) -> list[tuple[Any, list[str]]]:
        return [
            (run, [line for line in (*run.notes, run.verdict, run.following, run.alone) if line])
            for run in self._page.runs
        ]


def probe(
    trainer: Trainer,
    *,
    name: str = "notebook",
    seconds: float | None = None,
    address: str | None = None,
    core_speed: float = 1.0,
    quiet: bool = False,
) -> ProbeResult:
    """Measure a Trainer's input and its training loop, each without the other. The probe trains and stores nothing.

    Args:
        trainer: what a script's ``build()`` would return.
        name: the workload's name in the profile.
        seconds: the time for measuring, at least 5, besides the start of Ray; about a minute by default. Less time gives wider ranges.
        address: a Ray cluster (``"auto"``, ``"host:port"``); by default ``RAY_ADDRESS``, or else this machine without Ray.
        core_speed: the speed of this machine's cores, all of them busy, relative to an ml.c5 vCPU: 0.01 to 100.
        quiet: whether to hide the progress bar.

    Raises:
        ConfigError: for invalid arguments, or data that cannot be listed.
        RunError: if the training function or the data set fails, or the figures are implausible.
    """
    from offload.probe.driver import probe as measure

    if not isinstance(trainer, Trainer):
        raise ConfigError(f"trainer must be an offload.Trainer, found {shown(trainer)}.")
    if seconds is not None:
        check_number("seconds", seconds, least=LEAST_S, most=3600.0, sane="such as 20")
    check_number("core_speed", core_speed, least=0.01, most=100.0, sane="1 is an ml.c5 vCPU")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    measured = {"at": now, "core_speed": core_speed, **profile_age.facts(None)}
    known = {"workload": check_text("name", name, sane='such as "blur"'), "measured": measured}
    findings = measure(trainer, address=check_address(address), quiet=quiet, known=known, seconds=seconds)
    if findings is None:
        raise KeyboardInterrupt
    document = profile_document(findings)
    check_usable(document)
    return ProbeResult(document=document)


def plan(
    profile: ProbeResult | str | Path,
    *,
    gpu_types: Sequence[str],
    cpu_types: Sequence[str] = (),
    gpu_nodes: tuple[int, int] = (1, 1),
    cpu_nodes: tuple[int, int] = (0, 8),
    gpu_speed: float | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    objective: Literal["cost", "time"] = "cost",
    catalog: str | Path | None = None,
) -> PlanResult:
    """Recommend the nodes to rent for a profile, with their rate and their cost. Nothing is rented.

    Args:
        profile: a result of :func:`probe`, or the path of a ``profile.json``.
        gpu_types, gpu_nodes: types of the worker nodes, and the range of their number.
        cpu_types, cpu_nodes: types of the nodes that only preprocess, and the range of their number.
        gpu_speed: the planned GPU's speed relative to the profile's device, which must be known if they differ.
        batch_size: the global batch; the profile's by default.
        samples: the amount of work, samples of an epoch × epochs. Gives hours and dollars.
        objective: ``"cost"``: the fewest dollars per useful sample; ``"time"``: the fastest.
        catalog: a TOML file with more node types, or other prices.

    Raises:
        ConfigError: for an unknown type, an empty range, a GPU of unknown speed, or a file that is no profile.
    """
    for argument, types in (("gpu_types", gpu_types), ("cpu_types", cpu_types)):
        if isinstance(types, str):
            raise ConfigError(f"{argument} must be a list of types, found {types!r}. Pass [{types!r}].")
    if isinstance(profile, ProbeResult):
        document, source = profile.document, "the profile"
    elif isinstance(profile, str | Path):
        document, source = read_json(Path(profile), "the profile", "Was offload probe interrupted?"), str(profile)
    else:
        raise ConfigError(
            f"profile must be a result of probe(), or the path of a profile.json, found {shown(profile)}."
        )
    measured = Profile.from_document(document, source=source)
    result = make_plan(
        measured,
        load_catalog(None if catalog is None else Path(catalog)),
        gpu_types=gpu_types,
        gpu_nodes=gpu_nodes,
        cpu_types=cpu_types,
        cpu_nodes=cpu_nodes,
        gpu_speed=gpu_speed,
        batch_size=batch_size,
        samples=samples,
        objective=objective,
    ).document()
    result["warnings"] += profile_age.warnings(measured)
    return PlanResult(document=result)


def report(*run_dirs: str | Path) -> ReportResult:
    """Show one or several runs, which may still train or have crashed.

    Args:
        run_dirs: the directories of the runs. The first is the reference of a comparison.

    Raises:
        ConfigError: without a directory, or for a directory that holds no run.
    """
    if not run_dirs:
        raise ConfigError("report() needs the directory of a run, such as result.run_dir.")
    return ReportResult(_page=page_of([read_run(Path(folder)) for folder in run_dirs], load_catalog(None), {}))


def _chart(chart: Chart) -> str:
    file = io.BytesIO()
    draw_chart(chart, file)
    return _picture(file, chart.summary)


def _picture(file: io.BytesIO, words: str) -> str:
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(words)}" style="max-width: 100%" src="data:image/png;base64,{data}">'
