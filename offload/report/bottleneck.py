"""The bottleneck of a run in a sentence: the accelerator, the preprocessing cores, or the storage that they read from."""

from __future__ import annotations

from typing import Any

from offload.measure.steps import INPUT_BOUND

READING_BINDS = (
    0.5  # share of the preprocessing time spent waiting, from which on storage is the bottleneck rather than cores
)


def verdict(document: dict[str, Any]) -> str:
    """The run's bottleneck in plain words."""
    stall = document["stall"]
    if not document["steps"]:
        return "Nothing was trained."
    if stall < INPUT_BOUND:
        return f"The {document['device']} was the bottleneck: more CPUs would not speed this up."
    most = f"up to {1 / max(1 - stall, 1e-3):.1f} times this rate"
    blocked = max((rates.get("blocked", 0.0) for rates in document.get("input", {}).values() if rates), default=0.0)
    if blocked >= READING_BINDS:
        return (
            f"Reading was the bottleneck for {stall:.0%} of the time: preprocessing waited {blocked:.0%} of its time for files or other "
            f"programs. Faster storage would help, {most}; more CPU cores only as far as more requests at once do."
        )
    return f"Preprocessing was the bottleneck for {stall:.0%} of the time: more CPU cores would help, {most}."
