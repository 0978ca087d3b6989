"""The articles' examples train as their first lines say: a few steps each, with the real libraries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.parquet as pq
import pytest
import ray.train
import torch

from offload.cli.script import build_trainer
from tests.helpers import ROOT

ARTICLES = ROOT / "examples" / "articles"
FEW = 42  # images, of which 32 are for training

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where the examples leave data and runs. Threads of torch would wait for one another on a busy machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def fit(script: Path, *arguments: str, shared_cores: bool = False) -> dict[str, Any]:
    """The summary of ``offload run SCRIPT -- ARGUMENTS``; with shared cores, of ``--cpus-per-worker 0.5``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", [*sys.path])
        trainer = build_trainer(script, arguments, address=None)
        if shared_cores:
            trainer.scaling_config = ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5})
        summary = trainer.fit(run_dir="run", quiet=True).document
    assert summary["status"] == "finished"
    return summary


@pytest.fixture
def article(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Any]:
    """The module of that name. Processes of the tests' Ray need not be able to import it."""
    module = importlib.import_module(f"examples.articles.{request.param}")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)


def test_resnet18_on_two_workers() -> None:
    few = ("--images", str(FEW), "--width", "8", "--epochs", "2", "--batch-size", "16", "--workers", "2")
    summary = fit(ARTICLES / "cifar_resnet18.py", *few, shared_cores=True)
    assert (summary["workers"], summary["samples"]) == (2, 2 * 32)
    assert 0 <= summary["metrics"]["test_accuracy"] <= 1


def test_a_schedule_doubles_the_workers_of_the_elastic_resnet(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--images", str(FEW), "--batch-size", "16", "--epochs", "2", "--schedule", "0:1", "1:2")
    summary = fit(ARTICLES / "elastic_resnet.py", *few, shared_cores=True)
    assert summary["samples"] == 2 * 32
    assert (summary["metrics"]["workers"], summary["metrics"]["rows"]) == (2, 32)
    said = capsys.readouterr().out
    assert "1 worker(s)" in said
    assert "finished after 64 samples" in said


def test_mnist_adds_up_over_replicas() -> None:
    few = ("--samples", "96", "--epochs", "2", "--batch-size", "48", "--max-batch-size", "48")
    summary = fit(ARTICLES / "mnist_restart_safe.py", *few, shared_cores=True)
    assert (summary["workers"], summary["samples"]) == (2, 2 * 96)
    metrics = summary["metrics"]
    assert (metrics["accuracy"] * 96).is_integer()  # of all workers' rows
    assert (metrics["test_accuracy"] * 397) == pytest.approx(round(metrics["test_accuracy"] * 397))


def test_yolo_trains_an_epoch_of_progress() -> None:
    summary = fit(
        ARTICLES / "yolo_adaptive_batch.py", *("--images", "64", "--width", "8", "--epochs", "1", "--paced", "1", "0")
    )
    assert summary["samples"] >= 64
    assert summary["metrics"]["loss"] > 0


def test_the_loss_of_a_detection_is_least_for_the_truth() -> None:
    yolo = importlib.import_module("examples.articles.yolo_adaptive_batch")
    target = torch.from_numpy(yolo.Shapes(1, 96)[0]["target"])[None]
    holds, boxes, classes = target[..., :1], target[..., 1:5], torch.nn.functional.one_hot(target[..., 5].long(), 2)
    truth = torch.cat([20 * holds - 10, boxes.clamp(1e-4, 1 - 1e-4).logit(), 20.0 * classes], -1).permute(0, 3, 1, 2)
    assert yolo.detection_loss(truth, target) < 0.01
    for turned in (truth.flip(1), truth.flip(2), -truth):
        assert yolo.detection_loss(turned, target) > 0.1


def test_ten_blurs() -> None:
    few = ("--samples", "8", "--batch-size", "4", "--depth", "1", "--uint8")
    summary = fit(ROOT / "examples" / "vit_blur.py", *few)
    assert summary["samples"] == 8
    assert summary["input"]["train"]["wire_bytes_per_sample"] == pytest.approx(3 * 224**2, rel=0.01)


@pytest.mark.soak  # tests/tune has the shorter ones
@pytest.mark.ray
@pytest.mark.parametrize("article", ["convnet_asha"], indirect=True)
def test_tune_searches_with_asha(article: Any) -> None:
    results = article.search(trials=2, epochs=2, mnist=None)
    assert results.num_errors == 0
    epochs = sorted(result.metrics["training_iteration"] for result in results)
    assert epochs[-1] == 2  # the better one trains to the end
    assert results.get_best_result().metrics["accuracy"] > 0.2


def test_rllib_sees_what_the_player_saw(folder: Path) -> None:
    rllib = importlib.import_module("examples.articles.rllib_offline")
    rows = pq.read_table(rllib.record(folder / "catch", 3))
    seen = rllib.see({name: rows[name].to_numpy() for name in rows.column_names})
    game, row = rllib.Catch(), 0
    for episode in range(3):
        frame, _ = game.reset(seed=episode)
        over = False
        while not over:
            assert (seen["obs"][row] == frame).all()
            frame, reward, over, _, _ = game.step(seen["actions"][row])
            assert (seen["rewards"][row], seen["terminateds"][row]) == (reward, over)
            row += 1
        assert reward == 1.0  # a good player
    assert row == rows.num_rows


@pytest.mark.soak  # minutes of CPU time: imports of RLlib, and training until it plays
@pytest.mark.ray
@pytest.mark.parametrize("article", ["rllib_offline"], indirect=True)
def test_rllib_and_the_trainer_clone_the_same_module(article: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--iterations", "200", "--epochs", "15"]
    monkeypatch.setattr(sys, "argv", ["rllib_offline.py", *few])
    shares = article.main()
    assert list(shares) == ["untrained", "cloned by RLlib", "cloned by offload.Trainer"]
    # A module that never moves catches a fifth of the balls.
    assert shares["untrained"] < 0.4
    assert shares["cloned by RLlib"] > 0.6
    assert shares["cloned by offload.Trainer"] > 0.6
