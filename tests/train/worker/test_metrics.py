"""The metrics of checkpoints, by which a run keeps the best ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import Storage
from offload.train.config import Checkpoints
from offload.train.worker.context import Context
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared


def kept_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that a run has kept."""
    return [entry.metrics["step"] for entry in RunFolder(Storage(path=str(folder)), "run").entries()]


def accuracies(values: list[float]) -> Callable[[Context], None]:
    """A training function whose epochs end with these accuracies, and that commits twice within each epoch."""

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for epoch in ctx.epochs(len(values)):
            for number, batch in enumerate(ctx.batches("train")):
                if number in (2, 4):
                    commit(ctx)
                ctx.backward(loss_of(model, batch))
                ctx.step()
            ctx.report(accuracy=values[epoch])

    return train


@pytest.mark.parametrize("last", [0.4, float("nan")])
def test_the_best_checkpoint_outlives_those_without_a_measurement(tmp_path: Path, last: float) -> None:
    """Each epoch of eight steps stores three checkpoints, and the last of them has a measurement."""
    run = LocalRun(tmp_path, checkpoints=Checkpoints(every_s=None, best="accuracy"))
    run.train(accuracies([0.9, 0.5, last]))
    assert kept_steps(tmp_path) == [8, 16, 24], "the two best, and the newest"


@pytest.mark.parametrize(("mode", "kept"), [("max", [8, 24]), ("min", [16, 24])])
def test_a_run_that_begins_to_keep_the_best_compares_those_that_it_has(
    tmp_path: Path, mode: Literal["max", "min"], kept: list[int]
) -> None:
    run = LocalRun(tmp_path, checkpoints=Checkpoints(every_s=None, keep=6))
    run.train(accuracies([0.9, 0.5]))
    run.checkpoints = Checkpoints(every_s=None, best="accuracy", mode=mode, keep=1)
    run.train(accuracies([0.9, 0.5, 0.7]))
    assert kept_steps(tmp_path) == kept, "the best, and the newest"


def test_a_metric_reported_before_the_step_describes_it(tmp_path: Path) -> None:
    kept: list[Mapping[str, Any]] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            for number, batch in enumerate(ctx.batches("train")):
                loss = loss_of(model, batch)
                ctx.backward(loss)
                if number == 1:
                    ctx.report(loss=3.0)
                ctx.step()
                if number in (1, 2):
                    commit(ctx)

    LocalRun(tmp_path, kept=kept.append).train(train)
    assert [each.get("loss") for each in kept] == [3.0, None, None]
