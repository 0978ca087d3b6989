"""The chart of a plan: the gain from each further CPU node, and the cost of a sample."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

RATE, COST = "#2e86ab", "#d1495b"
KNEE = 0.95  # share of the highest rate that more nodes could reach


def knee(cpu_nodes: list[int], samples_per_s: list[float]) -> int:
    """The fewest CPU nodes that reach ``KNEE`` of the highest rate."""
    goal = KNEE * max(samples_per_s)
    return min(n for n, rate in zip(cpu_nodes, samples_per_s, strict=True) if rate >= goal)


def draw_plan(document: dict[str, Any], file: Path | BinaryIO) -> None:
    """Draw samples/s (with its 95 % band) and dollars per million samples against CPU nodes, for the recommended GPU nodes
    and each CPU type with them. A path's suffix sets the format; an open file gets a PNG.

    Raises ValueError for an unsupported format, OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    best = document["candidates"][document["recommended"]]
    lines = _lines(document)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    rates, costs = figure.subplots(2, 1, sharex=True)
    for number, (kind, rows) in enumerate(lines.items()):
        nodes = [_cpu_nodes(row, kind) for row in rows]
        style = {"ls": ("-", "--", ":", "-.")[number % 4], "marker": "o", "ms": 3}
        rate = [row["samples_per_s"] for row in rows]
        rates.fill_between(
            nodes,
            [r["samples_per_s_low"] for r in rows],
            [r["samples_per_s_high"] for r in rows],
            color=RATE,
            alpha=0.2,
            lw=0,
        )
        rates.plot(nodes, rate, color=RATE, label=kind, **style)
        at = knee(nodes, rate)
        rates.axvline(at, color="black", lw=0.8, ls=style["ls"])
        rates.annotate(f"knee: {at}", (at, 0), xytext=(3, 4), textcoords="offset points", fontsize=8)
        costs.plot(nodes, [r["usd_per_million_samples"] for r in rows], color=COST, label=kind, **style)
    host = next(iter(best["shape"]))
    rates.set_title(f"{best['shape'][host]} × {host}, and CPU nodes beside it", loc="left", fontsize=10)
    rates.set_ylabel("samples/s")
    costs.set_ylabel("$ per million samples")
    costs.set_xlabel("CPU nodes")
    for axes in (rates, costs):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    costs.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(file, dpi=150)


def _lines(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each CPU type, the candidates with the recommended GPU nodes, by their number of CPU nodes."""
    candidates = document["candidates"]
    host, count = next(iter(candidates[document["recommended"]]["shape"].items()))
    beside = [c for c in candidates if c["shape"].get(host) == count and c["samples_per_s"]]
    alone = [c for c in beside if len(c["shape"]) == 1]
    kinds = dict.fromkeys(kind for c in beside for kind in c["shape"] if kind != host)
    lines = {kind: alone + [c for c in beside if kind in c["shape"]] for kind in kinds} or {host: alone}
    for kind, rows in lines.items():
        rows.sort(key=partial(_cpu_nodes, kind=kind))
    return lines


def _cpu_nodes(candidate: dict[str, Any], kind: str) -> int:
    shape = list(candidate["shape"].items())
    return sum(count for name, count in shape[1:] if name == kind)
