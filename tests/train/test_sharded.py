"""Models that fully_shard divides among two workers train as whole ones do, and any number of workers resumes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.train.checkpoints.sharded import whole
from tests.train.test_loops import Points, error, fail_at

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def network(*, sharded: bool) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.LayerNorm(7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def weights(model: torch.nn.Module) -> list[float]:
    return [float(each) for p in model.parameters() for each in whole(p).detach().reshape(-1)]


def fit(train: Callable[[Any], None], folder: Path, *, config: dict[str, Any], **options: Any) -> dict[str, float]:
    given = {"workers": 2, "batch_size": 8, "seed": 1, "deterministic": True, **options}
    trainer = offload.Trainer(
        train, datasets={"train": offload.from_torch(Points())}, train_loop_config=config, **given
    )
    return dict(trainer.fit(run_dir=folder, quiet=True).metrics)


def train(ctx: Any) -> None:
    model = network(sharded=ctx.config["sharded"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    for _ in ctx.epochs(3):
        for batch in ctx.batches("train"):
            fail_at(ctx, 7)
            loss = error(model, batch)
            if ctx.global_step == 3 and ctx.sum(float(ctx.rank == 0)):
                ctx.skip()  # on all workers
            else:
                ctx.backward(loss)
            if ctx.step(clip_norm=0.5):
                scheduler.step()
    ctx.report({str(i): each for i, each in enumerate(weights(model))})


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.soak),
        {"batch_size": offload.BatchSize(initial=16, local=(1, 4))},
    ],
    ids=["one micro-batch", "accumulation"],
)
def test_a_sharded_model_trains_as_a_whole_one(tmp_path: Path, options: dict[str, Any]) -> None:
    metrics = [
        fit(train, tmp_path / str(sharded), config={"sharded": sharded, "fails": False}, **options)
        for sharded in (True, False)
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)


def test_any_number_of_workers_resumes_a_sharded_model(tmp_path: Path) -> None:
    expected = fit(train, tmp_path / "whole", config={"sharded": False, "fails": False})
    with pytest.raises(offload.RunError, match="on purpose"):
        fit(
            train,
            tmp_path / "begun",
            config={"sharded": True, "fails": True},
            checkpoints=offload.Checkpoints(every_s=0.01),
        )
    for workers, sharded in ((1, True), (2, False)):
        folder = tmp_path / f"{workers}-{sharded}"
        shutil.copytree(tmp_path / "begun", folder)
        resumed = fit(train, folder, config={"sharded": sharded, "fails": False}, workers=workers)
        assert resumed == pytest.approx(expected, rel=1e-5, abs=1e-6), (workers, sharded)
        assert "resumed" in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("loop", "options", "text"),
    [
        pytest.param(
            "plain", {}, "the loop calls optimizer.step() itself, and its model is sharded", marks=pytest.mark.soak
        ),
        pytest.param(
            "ctx",
            {"batch_size": offload.BatchSize(initial=8, max=64)},
            "the batch size adapts to the gradient of a whole",
            marks=pytest.mark.soak,
        ),
        ("ddp", {}, "ctx.prepare(ddp=...) got arguments of DistributedDataParallel, and a model that fully_shard"),
    ],
)
def test_what_a_sharded_model_does_not_allow_is_named(
    tmp_path: Path, loop: str, options: dict[str, Any], text: str
) -> None:
    def train(ctx: Any) -> None:
        model = network(sharded=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = ctx.prepare(model, optimizer, ddp={"static_graph": True} if loop == "ddp" else None)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                error(model, batch).backward()
                optimizer.step()

    with pytest.raises(offload.RunError) as caught:
        fit(train, tmp_path / "run", config={}, **{"deterministic": False, **options})
    assert text in str(caught.value)
