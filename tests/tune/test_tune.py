"""Searches with Ray's own Tuner on a real Ray: trials are runs, stop early, copy each other, and go on after an interruption."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import tune
from ray.tune.error import TuneError
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

import offload
from offload import arbiter
from tests.conftest import LOGICAL_CPUS
from tests.helpers import eventually

SAMPLES, EPOCHS = 32, 4
MANY = 40  # epochs: more than pass until Tune has written down what it knows


def train(ctx: offload.Context) -> None:
    """Lower one weight by the learning rate in every step, and report it."""
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(weight.weight)
    model, optimizer = ctx.prepare(weight, torch.optim.SGD(weight.parameters(), lr=ctx.config["lr"]))
    for epoch in ctx.epochs(ctx.config.get("epochs", EPOCHS)):
        if "log" in ctx.config:
            with Path(ctx.config["log"]).open("a") as log:
                log.write(f"{ctx.config['lr']} {epoch}\n")
        rows = [len(batch["x"]) for batch in lower(ctx, model)]
        rate = optimizer.param_groups[0]["lr"]
        ctx.report(score=-weight.weight.item(), rate=rate, rows=max(rows), steps=len(rows), trains=epoch)


def lower(ctx: offload.Context, model: torch.nn.Module) -> Iterator[Any]:
    for batch in ctx.batches("train"):
        ctx.backward(model(batch["x"]).mean())
        ctx.step()
        yield batch


def build(config: dict[str, Any]) -> offload.Trainer:
    data = torch.utils.data.TensorDataset(torch.ones(SAMPLES, 1))
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(data, columns=["x"])},
        batch_size=config.get("batch", 8),
        workers=1,
        train_loop_config=config,
    )


def searched(space: dict[str, Any], folder: Path, callback: tune.Callback | None = None, **settings: Any) -> tune.Tuner:
    return tune.Tuner(
        offload.tune.trainable(build),
        param_space=space,
        tune_config=tune.TuneConfig(metric="score", mode="max", **settings),
        run_config=tune.RunConfig(
            name="search", storage_path=str(folder), verbose=0, callbacks=[callback] if callback else None
        ),
    )


class Heard(tune.Callback):
    """Every result of every trial, in a file. Tune's own files lose results of a trial that pauses and goes on."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "heard"

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(result, default=str) + "\n")

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def all_is_free() -> bool:
    return ray.available_resources().get("CPU") == LOGICAL_CPUS and not offload.runs.listed()


@pytest.mark.ray
@pytest.mark.slow
def test_asha_stops_the_worse_trials_and_each_end_makes_room_for_the_next(ray_cluster: None, tmp_path: Path) -> None:
    scheduler = ASHAScheduler(time_attr="training_iteration", max_t=EPOCHS, grace_period=1, reduction_factor=2)
    rates = [0.4, 0.3, 0.2, 0.1]
    # No trial ends by itself, and the next one needs what it holds.
    space = {"lr": tune.grid_search(rates), "epochs": 1_000_000, "log": str(tmp_path / "log")}
    tuner = searched(space, tmp_path, scheduler=scheduler, max_concurrent_trials=1, reuse_actors=True)
    results = tuner.fit()
    trained = [float(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()]
    assert [rate for rate, _ in itertools.groupby(trained)] == rates, "one after the other"
    assert not results.errors
    best = results.get_best_result()
    assert best.config["lr"] == 0.4
    assert best.metrics["trains"] == EPOCHS - 1
    assert best.metrics["score"] == pytest.approx(0.4 * EPOCHS * SAMPLES / 8)
    table = results.get_dataframe()
    assert sorted(table["training_iteration"]) == [1, 1, 1, EPOCHS]
    eventually(all_is_free)
    # The checkpoint is that of the reported epoch, and loads without offload.
    assert best.checkpoint is not None
    with best.checkpoint.as_directory() as folder:
        (weight,) = torch.load(Path(folder, "model.pt")).values()
    assert -float(weight) == pytest.approx(best.metrics["score"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.soak  # real searches with restarts: minutes on a busy machine
def test_an_exploited_trial_goes_on_from_the_better_one_with_other_settings(ray_cluster: None, tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        synch=True,  # trials pause for each other, so that none is over before another begins
        quantile_fraction=0.5,
        resample_probability=1.0,
        hyperparam_mutations={"lr": [0.5], "batch": [16]},
    )
    space = {"lr": tune.grid_search([0.0, 0.25]), "batch": 8}
    heard = Heard(tmp_path)
    results = searched(space, tmp_path, heard, scheduler=scheduler, reuse_actors=True).fit()
    assert not results.errors
    every = heard.results()
    for line in every:
        assert (line["rate"], line["rows"]) == (line["config"]["lr"], line["config"]["batch"])
    exploited = [line for line in every if line["config"]["lr"] == 0.5]
    assert exploited
    # It has the donor's epochs behind it: in each, the weight went down.
    assert min(line["trains"] for line in exploited) > 0
    assert all(line["score"] > 0.5 * line["steps"] for line in exploited)
    eventually(all_is_free)


class Noted(torch.utils.data.Dataset[Any]):
    """A data set that notes each sample that it makes, and draws random numbers for it."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        with self.log.open("a") as file:
            file.write(f"{i}\n")
        return {"x": torch.rand(1)}


def sum_up(ctx: offload.Context) -> None:
    """Report the sum of all samples, always in the same order."""
    for _ in ctx.epochs(2):
        parts = []
        for batch in ctx.batches("train"):
            parts.append(batch["x"])
            ctx.skip()
        ctx.report(score=float(torch.cat(parts).flatten().sort().values.double().sum()))


@pytest.mark.ray
@pytest.mark.slow
def test_trials_share_samples_side_by_side_as_jobs_of_the_arbiter(ray_cluster: None, tmp_path: Path) -> None:
    def build_noted(config: dict[str, Any]) -> offload.Trainer:
        return offload.Trainer(
            sum_up,
            datasets={"train": offload.from_torch(Noted(tmp_path / "log"))},
            batch_size=config["batch"],
            workers=1,
        )

    heard = Heard(tmp_path)
    arbiter.start()
    try:
        results = tune.Tuner(
            offload.tune.trainable(build_noted, shared=f"ssd:{tmp_path / 'cache'}:1GB"),
            param_space={"batch": tune.grid_search([4, 8, 16])},
            tune_config=tune.TuneConfig(max_concurrent_trials=2, reuse_actors=True),
            run_config=tune.RunConfig(name="search", storage_path=str(tmp_path), verbose=0, callbacks=[heard]),
        ).fit()
    finally:
        arbiter.stop()
    assert not results.errors
    # Augmented anew in each epoch, and equal in all trials.
    by_trial: dict[str, list[float]] = {}
    for line in heard.results():
        by_trial.setdefault(line["trial_id"], []).append(line["score"])
    scores = [*by_trial.values()]
    assert scores[0][0] != scores[0][1]
    assert scores == [scores[0]] * 3
    made = Counter((tmp_path / "log").read_text().split())
    assert (len(made), set(made.values())) == (SAMPLES, {2})
    eventually(all_is_free)


class Interruption(tune.Callback):
    """End the search once its folder knows a checkpoint. Tune writes there in the background, so that may be several results later."""

    def __init__(self, folder: Path) -> None:
        self.search, self.happened = str(folder / "search"), folder / "interrupted"

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if not self.happened.exists() and self._known():
            self.happened.touch()
            raise RuntimeError("the power went off")

    def _known(self) -> bool:
        if not tune.Tuner.can_restore(self.search):
            return False
        kept = tune.Tuner.restore(self.search, trainable=offload.tune.trainable(build)).get_results()
        return any(result.checkpoint is not None for result in kept)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.soak  # real searches with restarts: minutes on a busy machine
def test_an_interrupted_search_goes_on_where_it_was(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")  # Tune notes at once what it knows
    space = {"lr": 0.25, "log": str(tmp_path / "log"), "epochs": MANY}
    with pytest.raises((RuntimeError, TuneError), match="the power went off"):
        searched(space, tmp_path, Interruption(tmp_path)).fit()
    eventually(all_is_free)
    restored = tune.Tuner.restore(str(tmp_path / "search"), trainable=offload.tune.trainable(build))
    results = restored.fit()
    assert not results.errors
    assert results[0].metrics["trains"] == MANY - 1
    assert results[0].metrics["score"] == pytest.approx(0.25 * MANY * SAMPLES / 8)
    # What Tune knew a checkpoint of is not trained again.
    assert (tmp_path / "log").read_text().splitlines().count("0.25 0") == 1


@pytest.mark.ray
@pytest.mark.slow
def test_checkpoints_of_an_earlier_search_in_a_shared_storage_are_left_alone(ray_cluster: None, tmp_path: Path) -> None:
    storage = tmp_path / "checkpoints"
    earlier = storage / "trial" / "checkpoint_2026-01-01_00-00-00.000000" / "model.pt"
    earlier.parent.mkdir(parents=True)
    earlier.touch()

    def build_stored(config: dict[str, Any]) -> offload.Trainer:
        trainer = build(config)
        trainer.storage_path = str(storage)
        return trainer

    results = tune.Tuner(
        offload.tune.trainable(build_stored),
        param_space={"lr": 0.25, "epochs": 2},
        tune_config=tune.TuneConfig(trial_name_creator=lambda trial: "trial"),
        run_config=tune.RunConfig(name="search", storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not results.errors
    with results[0].checkpoint.as_directory() as folder:
        (weight,) = torch.load(Path(folder, "model.pt")).values()
    assert -float(weight) == pytest.approx(0.25 * 2 * SAMPLES / 8)
    eventually(all_is_free)
    # The trial has ended by itself. Tune has its checkpoint, so its own folder is gone.
    eventually(lambda: [path for path in storage.rglob("*") if path.is_file()] == [earlier])


def silent(ctx: offload.Context) -> None:
    for _ in ctx.epochs(1):
        pass


@pytest.mark.ray
@pytest.mark.slow
def test_a_trial_without_a_result_says_so(ray_cluster: None, tmp_path: Path) -> None:
    def build_silent(config: dict[str, Any]) -> offload.Trainer:
        return offload.Trainer(silent, datasets={"train": [{"x": 0.0}] * 8}, batch_size=8, workers=1)

    tuner = tune.Tuner(
        offload.tune.trainable(build_silent),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    (error,) = tuner.fit().errors
    assert "the training function reported nothing, so Tune has no result of this trial: call ctx.report(...)" in str(
        error
    )


def test_a_build_that_returns_no_trainer_is_refused() -> None:
    with pytest.raises(offload.ConfigError, match=r"build must be callable \(a function of a configuration"):
        offload.tune.trainable(3)  # type: ignore[arg-type]

    def build_nothing(config: dict[str, Any]) -> None: ...

    with pytest.raises(
        offload.ConfigError,
        match=r"build\(config\) must return an offload.Trainer, and build_nothing returned nothing: return offload.Trainer",
    ):
        offload.tune.trainable(build_nothing)({"lr": 0.1})


def test_without_ray_tune_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "offload.tune.trial", raising=False)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    monkeypatch.delattr(ray, "tune")
    with pytest.raises(offload.ConfigError, match=r"offload\.tune needs Ray Tune, .*: pip install 'offload\[tune\]'"):
        offload.tune.trainable(build)
