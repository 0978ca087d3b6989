"""A run is interrupted in the middle of an epoch and resumed: its history has every sample exactly once per epoch.

The program starts itself: each of the two drivers is a process of its own.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import offload
from benchmarks.matrix.programs.common import (
    SAMPLES,
    TRAINED_AT_MOST,
    expect,
    expect_each_once,
    history,
    run,
    trainer,
)
from benchmarks.matrix.programs.common import train as common_train
from tests.emulation.numbers import Numbers

AT_STEP = 5
INTERRUPTED = "interrupted"
SAMPLE_S = 0.01  # so that the interruption reaches the run before many epochs have passed


def interrupt_driver(ctx: offload.Context) -> None:
    if ctx.rank == 0 and ctx.global_step == AT_STEP:
        os.kill(ctx.config["driver_pid"], signal.SIGTERM)


def train_one_more_epoch(ctx: offload.Context) -> None:
    """Train the rest of the interrupted epoch, and the next one."""
    from benchmarks.matrix.programs.common import log_batch, model_of

    model, _ = model_of(ctx)
    begun = None
    for epoch in ctx.epochs(TRAINED_AT_MOST):
        begun = epoch if begun is None else begun
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]), ctx.config["driver"])
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
        if epoch > begun:
            return


def drive(folder: Path, driver: int) -> None:
    """One of the two drivers: 0 trains until it is interrupted, 1 resumes."""
    config = {"driver": driver, "driver_pid": os.getpid(), "epochs": TRAINED_AT_MOST, "at_step": interrupt_driver}
    made = trainer(
        folder,
        common_train if driver == 0 else train_one_more_epoch,
        datasets={"train": offload.from_torch(Numbers(SAMPLES, seconds=SAMPLE_S))},
        workers=2,
        config=config,
    )
    print(made.fit(run_dir=folder / "run", quiet=True).status)


def program(folder: Path) -> dict[str, Any]:
    statuses = []
    for driver in (0, 1):
        command = [sys.executable, "-m", "benchmarks.matrix.programs.resume", str(folder), str(driver)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        statuses.append((done.stdout.split() or [f"code {done.returncode}"])[-1])
    expect(statuses == [INTERRUPTED, "finished"], f"the two drivers ended with {statuses}")
    drivers = {line["attempt"] // 1000 for line in history(folder)}
    expect(drivers == {0, 1}, f"batches are from the drivers {drivers}")
    return {"passes": expect_each_once(folder, None)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        drive(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        run(program)
