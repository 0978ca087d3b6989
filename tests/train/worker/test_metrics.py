"""The metrics of checkpoints, by which Ray Train keeps the best ones, and the order of the older ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import ray.train
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext

from offload.train.checkpoints.ray_list import mend_snapshot
from offload.train.checkpoints.storage import Storage
from offload.train.config import Checkpoints
from offload.train.worker.context import Context
from offload.train.worker.saving.checkpointer import RayCheckpointer, RayStored
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, by Ray


class RayList:
    """Ray Train's own list of a run's checkpoints, of which the folder holds ``number``. ``numbers``: those that it keeps, in its order."""

    def __init__(
        self, folder: Path, *, best: str | None, keep: int = 2, mode: Literal["max", "min"] = "max", number: int = 0
    ) -> None:
        self._storage = StorageContext(storage_path=str(folder), experiment_dir_name="run")
        self._config = ray.train.CheckpointConfig(
            num_to_keep=keep, checkpoint_score_attribute=best, checkpoint_score_order=mode
        )
        self._number = number

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Store a checkpoint."""
        self._number += 1
        self._manager = CheckpointManager(self._config, self._storage)  # as after a restart
        path = self._storage.build_checkpoint_path_from_name(f"checkpoint_{self._number:02}")
        os.makedirs(path)
        checkpoint = ray.train.Checkpoint(path, self._storage.storage_filesystem)
        report: Any = SimpleNamespace(checkpoint=checkpoint, metrics=dict(metrics), validation=None)

        async def register() -> None:
            self._manager.register_checkpoint(report)

        asyncio.run(register())

    @property
    def checkpoints(self) -> list[ray.train.Checkpoint]:
        return [each.checkpoint for each in self._manager._checkpoint_results if each.checkpoint is not None]

    @property
    def numbers(self) -> list[int]:
        return [int(each.path.rsplit("_", 1)[1]) for each in self.checkpoints]


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
def test_the_best_checkpoint_outlives_those_without_a_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: float
) -> None:
    """Each epoch stores three checkpoints, and the last of them has a measurement."""
    listed = RayList(tmp_path, best="accuracy", keep=2)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    run = LocalRun(shelf, checkpoints=Checkpoints(every_s=None, best="accuracy"), kept=listed.add)
    run.train(accuracies([0.9, 0.5, last]))
    assert set(listed.numbers) == {3, 6, 9}, "the two best, and the newest"
    assert "has no key" not in caplog.text


def test_a_run_that_begins_to_keep_the_best_compares_those_that_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray Train takes the list as it is, in the order of time, and a checkpoint without the metric for the best of mode="min"."""
    before = RayList(tmp_path, best=None, keep=3)
    for metrics in ({"loss": 0.9}, {"loss": 0.2}, {}):
        before.add(metrics)
    settings = Checkpoints(best="loss", mode="min", keep=2)
    assert mend_snapshot(Storage(path=str(tmp_path)), "run", settings) == 3
    after = RayList(tmp_path, best="loss", mode="min", keep=2, number=3)
    for loss in (0.4, 0.5):
        after.add({"loss": loss})
    assert set(after.numbers) == {2, 4, 5}, "the two best, and the newest"
    assert "has no key" not in caplog.text
    assert mend_snapshot(Storage(path=str(tmp_path)), "run", Checkpoints(keep=2)) == 3
    again = RayList(tmp_path, best=None, keep=2, number=5)
    again.add({})
    assert again.numbers == [5, 6], "the newest"


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


def test_the_older_checkpoints_come_newest_first_also_if_the_best_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = RayList(tmp_path, best="accuracy", keep=4)
    for accuracy in (0.7, 0.9, 0.5, 0.8):
        listed.add({"accuracy": accuracy})
    assert listed.numbers == [3, 1, 4, 2]
    reported = [SimpleNamespace(checkpoint=each) for each in listed.checkpoints]
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda: reported)
    newest = next(RayStored(each) for each in listed.checkpoints if each.path.endswith("04"))
    older = RayCheckpointer().before(newest)
    assert [each.path[-2:] for each in older] == ["03", "02", "01"]
