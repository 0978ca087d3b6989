"""The history of a run: the samples from which its final state has learned, as recorded by the workers.

A step that was lost again, because its worker died before the next checkpoint, is not part of that history.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROUND = 1000  # attempts reserved for one driver; a restarted driver counts from the next multiple


def log_batch(ctx: Any, batch: Mapping[str, Any], folder: Path, driver: int = 0) -> None:
    """Record the current batch, before it is trained. ``driver``: the number of earlier starts of the run."""
    line = {
        "attempt": driver * ROUND + ctx._loop.passes.attempt,
        "workers": ctx.world_size,
        "epoch": ctx.epoch,
        "step": ctx.global_step,
        "ids": batch["sample_id"][: ctx.rows].tolist(),  # the rest are fillers
    }
    with open(folder / f"{line['attempt']}-{ctx.rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of the final state's history: from each attempt, those before the step at which a later attempt began."""
    lines = [json.loads(text) for path in folder.glob("*.jsonl") for text in path.read_text().splitlines()]
    begun: dict[int, int] = {}
    for line in lines:  # not from events: a worker that dies early reports none
        begun[line["attempt"]] = min(line["step"], begun.get(line["attempt"], line["step"]))
    return [
        line
        for line in lines
        if all(line["step"] < step for attempt, step in begun.items() if attempt > line["attempt"])
    ]


def each_pass(lines: Sequence[Mapping[str, Any]]) -> dict[int, Counter[int]]:
    """The number of times that each id was trained, by pass."""
    passes: dict[int, Counter[int]] = {}
    for line in lines:
        passes.setdefault(line["epoch"], Counter()).update(line["ids"])
    return passes
