"""Commits that training does not wait for, on the real training loop."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from offload.errors import RunError
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.config import Checkpoints
from offload.train.worker.context import Context
from offload.train.worker.saving import committing
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared

SAMPLES, BATCH = 64, 8


@pytest.fixture
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training go on after each regular commit, whatever its interval."""
    monkeypatch.setattr(committing, "LEAST_TO_GO_ON_S", 0.0)


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_last_commit_is_complete_before_the_workers_end(tmp_path: Path, workers: int) -> None:
    """The loop breaks off right after a commit that nobody waited for."""
    waited: list[bool] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                ctx.step()
                if ctx.global_step == 3:
                    commit(ctx)
                    waited.append(ctx._loop.state.settled)
                    return

    run = LocalRun(tmp_path, samples=SAMPLES, checkpoints=Checkpoints(every_s=None))
    run.train(train, workers=workers)
    assert waited == [False] * workers
    (entry,) = RunFolder(run.storage, "run").entries()
    assert entry.metrics["step"] == 3


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_commit_that_nobody_waited_for_ends_the_run_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    steps: list[int] = []

    def full(folder: RunFolder, name: str, files: Path) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(100):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                ctx.step()
                if ctx.rank == 0:
                    steps.append(ctx.global_step)
                    ctx._loop.place.checkpoints.close()  # the checkpoint before has failed by now

    monkeypatch.setattr(RunFolder, "put", full)
    run = LocalRun(tmp_path, samples=SAMPLES, checkpoints=Checkpoints(every_s=1e-9, every_epochs=1000))
    with pytest.raises(RunError, match="the checkpoint could not be stored: No space left on device"):
        run.train(train, workers=workers)
    assert len(steps) < SAMPLES / BATCH
    assert RunFolder(run.storage, "run").look() == []
