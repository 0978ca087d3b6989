"""A schedule resizes a run from two workers to one and back: each epoch has its number of workers, and each sample once."""

from pathlib import Path
from typing import Any

import offload
from benchmarks.matrix.programs.common import expect, expect_each_once, history, run, trainer

SCHEDULE = {0: 2, 1: 1, 2: 2}


def program(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "workers": (1, 2),
        "adaptation": offload.Adaptation(schedule=SCHEDULE),
        "config": {"epochs": len(SCHEDULE)},
    }
    result = trainer(folder, **settings).fit(run_dir=folder / "run", quiet=True)
    expect(result.status == "finished", f"the run is {result.status}")
    passes = expect_each_once(folder, len(SCHEDULE))
    trained: dict[int, set[int]] = {}
    for line in history(folder):
        trained.setdefault(line["epoch"], set()).add(line["workers"])
    expect(trained == {epoch: {workers} for epoch, workers in SCHEDULE.items()}, f"workers by epoch: {trained}")
    return {"passes": passes, "workers": list(SCHEDULE.values())}


if __name__ == "__main__":
    run(program)
