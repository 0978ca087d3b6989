"""A run is interrupted in the middle of an epoch and resumed: its history has every sample exactly once per epoch.

The program starts itself: each of the two drivers is a process of its own.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import offload
from benchmarks.matrix.programs.common import (
    SAMPLES,
    TRAINED_AT_MOST,
    expect,
    expect_each_once,
    history,
    model_of,
    run,
    train,
    trainer,
)
from tests.emulation.history import ROUND, log_batch
from tests.emulation.numbers import Numbers

INTERRUPTED = "interrupted"
SAMPLE_S = 0.01  # so that the interruption reaches the run before many epochs have passed
TRAINS = '"first_step"'
"""The event that says that the run has begun: only then is there anything to commit."""
DEADLINE_S = 200.0


def train_one_more_epoch(ctx: offload.Context) -> None:
    """Train the rest of the interrupted epoch, and the next one."""
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
    made = trainer(
        folder,
        train if driver == 0 else train_one_more_epoch,
        datasets={"train": offload.from_torch(Numbers(SAMPLES, seconds=SAMPLE_S))},
        workers=2,
        config={"driver": driver, "epochs": TRAINED_AT_MOST},
    )
    print(made.fit(run_dir=folder / "run", quiet=True).status)


def start(folder: Path, driver: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.matrix.programs.resume", str(folder), str(driver)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """The status of the run that a driver has printed when it ends."""
    said, _ = process.communicate()
    return (said.split() or [f"code {process.returncode}"])[-1]


def wait_until_it_trains(events: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not (events.exists() and TRAINS in events.read_text()):
        expect(process.poll() is None and time.monotonic() < until, "the first driver never trained")
        time.sleep(0.1)


def program(folder: Path) -> dict[str, Any]:
    first = start(folder, 0)
    wait_until_it_trains(folder / "run" / "events.jsonl", first)
    first.terminate()
    statuses = [ended(first), ended(start(folder, 1))]
    expect(statuses == [INTERRUPTED, "finished"], f"the two drivers ended with {statuses}")
    drivers = {line["attempt"] // ROUND for line in history(folder)}
    expect(drivers == {0, 1}, f"batches are from the drivers {drivers}")
    return {"passes": expect_each_once(folder, None)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        drive(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        run(program)
