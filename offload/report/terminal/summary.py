"""The text of a run's summary."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.formatting import GOODPUT_DIFFERS, rate_shown
from offload.report.bottleneck import verdict


def summary_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) for each line of the table."""
    rows = [
        ("status", _status(document)),
        ("trained", f"{document['samples']:,} samples in {document['steps']:,} steps, {document['epochs']} epochs"),
        ("wall time", _duration(document["wall_s"])),
        ("throughput", f"{document['samples_per_s']:,.1f} samples/s while stepping"),
    ]
    if document.get("goodput", math.inf) < GOODPUT_DIFFERS * document["samples_per_s"]:
        rows.append(("goodput", f"{document['goodput']:,.1f} samples/s as useful as the initial batch's"))
    split = f"{document['workers']} × {document['local_batch_size']} × {document['accum_steps'] + 1}"
    rows.append(
        ("workers × local batch × micro-batches", f"{split} = {document['global_batch_size']} on {document['device']}")
    )
    rows.append(("stall", f"{document['stall']:.1%} of step time waiting for data"))
    if document["steps"]:
        per_step = {
            k: document[f"{k}_s"] / document["step_count_all_ranks"]
            for k in ("data_wait", "peer_wait", "compute", "sync")
        }
        rows.append(("a step", "  ".join(f"{k.replace('_', ' ')} {v * 1000:.1f} ms" for k, v in per_step.items())))
    for name, rates in document.get("input", {}).items():
        if rates:
            cores = f"{document['preprocessing_cores']} core{'' if document['preprocessing_cores'] == 1 else 's'}"
            rows.append(
                (
                    f"preprocessing of {name}",
                    f"{rates['core_seconds_per_sample'] * 1000:.2f} core-ms and {rates['wire_bytes_per_sample'] / 1000:,.1f} kB "
                    f"a sample; {cores}: at most {rate_shown(rates['input_ceiling_samples_per_s'])} samples/s",
                )
            )
            if read := rates.get("cache_bytes", 0) + rates.get("storage_bytes", 0):
                rows.append(
                    (
                        f"reading of {name}",
                        f"{rates['cache_bytes'] / read:.0%} of {read / 1e9:,.3g} GB came from the nodes' caches",
                    )
                )
    if document.get("first_batch_s") is not None:
        rows.append(("first batch after", f"{document['first_batch_s']:.1f} s"))
    if document.get("skipped"):
        rows.append(("skipped samples", f"{document['skipped']:,}, listed in skipped.jsonl"))
    for name, value in document.get("metrics", {}).items():
        rows.append((name, "not finite" if value is None else f"{value:.4g}"))
    if document.get("checkpoint"):
        rows.append(("checkpoint", str(document["checkpoint"])))
    rows.append(("run directory", str(document["run_dir"])))
    return rows


def format_summary(document: dict[str, Any], *, width: int = 110) -> str:
    """The table and the verdict as text."""
    table = Table(show_header=False, title="offload run", title_justify="left", box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in summary_rows(document):
        table.add_row(Text(what), Text(value))  # a path or an error may hold [brackets]
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False, highlight=False)
    console.print(table)
    console.print(verdict(document), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _status(document: dict[str, Any]) -> str:
    if document["status"] == "interrupted":
        return "interrupted; the same command resumes it"
    return f"failed: {document['error']}" if document["status"] == "failed" else str(document["status"])


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
