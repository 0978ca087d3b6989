"""What a run measures of its own steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from offload.train.config import BatchSize
from offload.train.worker.context import Context
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
