"""Runs of trials without a cluster: each has checkpoints of its own, which go at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.train.callback import Checkpoint, Metrics
from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints.run_folder import new_name
from offload.tune import copies
from offload.tune.trial import TrialRun

STEPS = 8


def train(ctx: offload.Context) -> None: ...


def build(config: dict[str, Any]) -> offload.Trainer:
    return offload.Trainer(
        train, datasets={"train": [{"x": 0.0}]}, batch_size=1, storage_path=config.get("storage"), workers=1
    )


def written(files: Path, weight: float, step: int = STEPS) -> Path:
    """A local folder with the files of a checkpoint."""
    files.mkdir(parents=True)
    checkpoints.save(files, {"weight": torch.tensor(weight)}, {}, {"step": step})
    return files


@pytest.fixture(autouse=True)
def short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of training, a run commits one checkpoint of a weight of 2, and reports its step."""

    def fit(trainer: offload.Trainer, *, run_dir: Path, quiet: bool) -> None:
        folder = trainer.checkpoint_folder(run_dir)
        folder.put(new_name(folder.whole()), written(run_dir / "files", 2.0))
        for callback in trainer.callbacks:
            callback.metrics(Metrics(at=0.0, epoch=0, step=STEPS, values={"score": 2.0}))
            callback.checkpoint(Checkpoint(at=0.0, epoch=0, step=STEPS, reason="epoch", seconds=0.0, waited=True))

    monkeypatch.setattr(offload.Trainer, "fit", fit)
    monkeypatch.setattr("offload.arbiter.registry.arbiter", lambda: None)


def ended(run: TrialRun) -> TrialRun:
    """The run, once Tune has all its results."""
    while run.next() is not None:
        pass
    return run


def weight_kept(run: TrialRun, target: Path) -> float:
    """The weight in the checkpoint that Tune keeps of the run's last result."""
    target.mkdir()
    copies.save(run.folder, run.stored_step, target, {})
    return float(torch.load(target / "model.pt")["weight"])


def test_a_run_that_ended_by_itself_leaves_nothing_once_tune_has_its_checkpoint(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    run = ended(TrialRun(build({"storage": str(storage)}), tmp_path / "logs" / "trial", None))
    assert weight_kept(run, tmp_path / "kept") == 2.0
    assert run.end()
    assert not list(storage.iterdir())


def test_a_run_has_nothing_to_do_with_the_checkpoints_of_others_of_its_name(tmp_path: Path) -> None:
    trainer = build({"storage": str(tmp_path / "storage")})
    # The process of the first run is killed after a step of which Tune does not know. The others run on nodes of their own.
    killed = ended(TrialRun(trainer, tmp_path / "node 1" / "trial", None))
    killed.folder.put(new_name(killed.folder.whole()), written(tmp_path / "stale", 1.0))
    before = killed.folder.whole()
    source = written(tmp_path / "tune", 0.5, step=4)
    start = copies.load(source, {})
    fresh = ended(TrialRun(trainer, tmp_path / "node 2" / "trial", None))
    going_on = ended(TrialRun(trainer, tmp_path / "node 3" / "trial", start))
    assert weight_kept(fresh, tmp_path / "of fresh") == 2.0
    assert weight_kept(going_on, tmp_path / "of going on") == 2.0
    assert fresh.end()
    assert going_on.end()
    assert killed.folder.whole() == before


def test_a_trial_does_not_go_on_while_its_earlier_run_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trial = offload.tune.trainable(build)({})
    monkeypatch.setattr(trial, "_logdir", str(tmp_path))
    trial.step()
    with monkeypatch.context() as stuck:
        stuck.setattr(TrialRun, "end", lambda run: False)
        with pytest.raises(offload.RunError, match="the earlier run of this trial's process has not ended within 60 s"):
            trial.load_checkpoint(str(written(tmp_path / "tune", 0.5)))
    trial.cleanup()
