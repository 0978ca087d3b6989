"""Which samples the state that a run ends with has learned from: written down by the workers, and read back.

A step that was made and lost again (its worker died before the next checkpoint) is not part of that history.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROUND = 1000  # attempts of one driver; those of a driver started again count on from the next such number


def log_batch(ctx: Any, batch: Mapping[str, Any], folder: Path, driver: int = 0) -> None:
    """Write down the batch in hand, before it is trained. ``driver``: how often the run was started before."""
    line = {
        "attempt": driver * ROUND + ctx._loop.attempt,
        "workers": ctx.world_size,
        "epoch": ctx.epoch,
        "step": ctx.global_step,
        "ids": batch["sample_id"][: ctx.rows].tolist(),  # behind those, fillers
    }
    with open(folder / f"{line['attempt']}-{ctx.rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of the final state's history: of each attempt those before the step at which a later one began."""
    lines = [json.loads(text) for path in folder.glob("*.jsonl") for text in path.read_text().splitlines()]
    begun: dict[int, int] = {}
    for line in lines:  # not from events: a worker that dies early tells none
        begun[line["attempt"]] = min(line["step"], begun.get(line["attempt"], line["step"]))
    return [
        line
        for line in lines
        if all(line["step"] < step for attempt, step in begun.items() if attempt > line["attempt"])
    ]


def each_pass(lines: Sequence[Mapping[str, Any]]) -> dict[int, Counter[int]]:
    """By pass, how often each id was trained."""
    passes: dict[int, Counter[int]] = {}
    for line in lines:
        passes.setdefault(line["epoch"], Counter()).update(line["ids"])
    return passes
