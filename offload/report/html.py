"""``report.html``, which shows the run on one page, without scripts or downloads."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import jinja2

from offload.report.run_dir import EVENTS, METRICS, REPORT, SKIPPED, SUMMARY, RunDirectory, read_lines
from offload.report.summary import summary_rows, verdict


def write_report(directory: RunDirectory) -> None:
    """Render the page from the files of the run directory."""
    path = directory.path
    document = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    environment = jinja2.Environment(loader=jinja2.PackageLoader("offload.report", "templates"), autoescape=True)
    page = environment.get_template("report.html.j2").render(
        title=path.name,
        rows=summary_rows(document),
        verdict=verdict(document),
        chart=_chart(read_lines(path / METRICS)),
        events=[_event_row(e) for e in read_lines(path / EVENTS)],
        skipped=read_lines(path / SKIPPED)[:200],
        versions=document["versions"],
    )
    directory.write(REPORT, page)


def _event_row(event: dict[str, Any]) -> dict[str, str]:
    rest = {k: v for k, v in event.items() if k not in ("event", "at", "rank")}
    return {
        "at": datetime.fromtimestamp(event["at"], UTC).strftime("%H:%M:%S"),
        "kind": event["event"],
        "rest": "  ".join(
            f"{k}={json.dumps(v) if isinstance(v, dict | list) else v}" for k, v in rest.items() if v is not None
        ),
    }


def _chart(lines: list[dict[str, Any]]) -> str:
    """An SVG of the throughput with both ceilings, and of the parts of a step's time, over the run."""
    if len(lines) < 2:
        return ""
    from matplotlib.figure import Figure

    start = lines[0]["at"]
    t = [line["at"] - start for line in lines]
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    rates, shares = figure.subplots(2, 1, sharex=True)
    nan = float("nan")

    def column(name: str) -> list[float]:
        return [nan if line.get(name) is None else float(line[name]) for line in lines]

    rates.plot(t, column("samples_per_s"), color="#1a1a2e", lw=2, label="measured")
    rates.plot(t, column("input_ceiling_samples_per_s"), color="#d1495b", lw=1, ls="--", label="input ceiling")
    rates.plot(t, column("device_ceiling_samples_per_s"), color="#2e86ab", lw=1, ls="--", label="device ceiling")
    rates.set_ylabel("samples/s")
    top = max([v for v in column("samples_per_s") if v == v], default=1.0)
    rates.set_ylim(0, 2.5 * max(top, 1e-9))
    rates.legend(fontsize=8, frameon=False, ncols=3, loc="upper right")
    total = [max(v, 1e-9) for v in column("step_time_s")]
    stack = {
        "compute": ("compute_s", "#2e86ab"),
        "sync": ("sync_s", "#8d99ae"),
        "other ranks' data": ("peer_wait_s", "#edae49"),
        "waiting for data": ("data_wait_s", "#d1495b"),
    }
    shares.stackplot(
        t,
        [[v / s for v, s in zip(column(name), total, strict=True)] for name, _ in stack.values()],
        labels=list(stack),
        colors=[color for _, color in stack.values()],
        alpha=0.85,
    )
    shares.set_ylim(0, 1)
    shares.set_ylabel("share of step time")
    shares.set_xlabel("seconds of the run")
    shares.legend(fontsize=8, frameon=False, ncols=4, loc="lower right")
    for axes in (rates, shares):
        axes.spines[["top", "right"]].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]
