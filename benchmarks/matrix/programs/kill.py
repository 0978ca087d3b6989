"""A worker is killed with SIGKILL in the middle of a run: the run finishes, and its history has every sample exactly once per epoch."""

import os
import signal
from pathlib import Path
from typing import Any

import offload
from benchmarks.matrix.programs.common import expect, expect_each_once, history, run, trainer

AT_STEP = 5


def die_once(ctx: offload.Context) -> None:
    died = Path(ctx.config["log"]) / "died"
    if ctx.rank == 1 and ctx.global_step >= AT_STEP and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def program(folder: Path) -> dict[str, Any]:
    result = trainer(folder, workers=2, config={"at_step": die_once}).fit(run_dir=folder / "run", quiet=True)
    expect(result.status == "finished", f"the run is {result.status}")
    expect((folder / "log" / "died").exists(), "no worker died")
    attempts = {line["attempt"] for line in history(folder)}
    return {"passes": expect_each_once(folder), "attempts": len(attempts)}


if __name__ == "__main__":
    run(program)
