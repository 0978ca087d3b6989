"""What a run measures of its own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.measure.steps import StepClock
from offload.train.config import BatchSize, Checkpoints
from offload.train.worker.context import Context
from tests.emulation.in_threads import Unjoined
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared

SAMPLES = 48


def within_the_step(ctx: Context) -> None:
    ctx.report(loss=1.0)


def validation(ctx: Context) -> None:
    for _ in ctx.batches("val"):
        ctx.report(loss=1.0)


@pytest.mark.parametrize("does", [within_the_step, validation, lambda ctx: None])
@pytest.mark.parametrize("local", [8, 2])
def test_each_step_counts_its_samples_whatever_happens_in_it(
    tmp_path: Path, does: Callable[[Context], None], local: int
) -> None:
    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                does(ctx)
                if not ctx.step():
                    does(ctx)
                else:
                    commit(ctx)

    (loop,) = LocalRun(tmp_path, samples=SAMPLES, sizes=BatchSize(initial=8, local=(1, local))).train(train)
    totals = loop.meter.totals()
    assert (totals.steps, totals.samples, totals.useful) == (SAMPLES // 8, SAMPLES, SAMPLES)
    assert totals.compute_s > 0
    assert totals.step_time_s >= totals.compute_s + totals.data_wait_s


def test_a_regular_checkpoint_takes_nothing_from_the_step_whose_batch_has_come(tmp_path: Path) -> None:
    kept: list[Mapping[str, Any]] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                ctx.step()

    run = LocalRun(tmp_path, samples=SAMPLES, checkpoints=Checkpoints(every_s=1e-9), kept=kept.append)
    (loop,) = run.train(train)
    assert len(kept) > 2, "checkpoints within the epoch"
    assert loop.meter.totals().samples == SAMPLES


class Hands(StepClock):
    """A clock that the test moves."""

    at = 0.0

    def mark(self) -> float:
        return self.at


class Exchange(Unjoined):
    """Exchanges of gradients that take a second each, on this rank's clock."""

    def __init__(self) -> None:
        self.hands = Hands()

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        self.hands.at += 1.0


@pytest.mark.parametrize("losses", [1, 2])
def test_the_exchange_of_several_models_is_synchronising_and_what_follows_is_not(tmp_path: Path, losses: int) -> None:
    def train(ctx: Context) -> None:
        join: Any = ctx._loop.place.join
        ctx._loop.meter._clock = join.hands
        models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        ctx.prepare(*models, *optimizers)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                for model, optimizer in zip(models, optimizers, strict=True):
                    for _ in range(losses):
                        join.hands.at += 4.0 / losses  # a forward pass
                        ctx.backward(loss_of(model, batch))
                    ctx.step(optimizer)

    for loop in LocalRun(tmp_path, samples=SAMPLES, join=Exchange).train(train, workers=2):
        totals = loop.meter.totals()
        assert (totals.compute_s, totals.sync_s) == (8.0 * totals.steps, 2.0 * totals.steps)
