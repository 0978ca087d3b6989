"""Training loops that leave a pass before its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.train.config import BatchSize
from offload.train.worker.context import Context
from tests.emulation.in_threads import Died
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared

SAMPLES = 64


@pytest.mark.parametrize("workers", [1, 2])
def test_every_step_counts_in_its_own_epoch_though_the_loop_keeps_the_iterator(tmp_path: Path, workers: int) -> None:
    """A progress bar keeps the iterator until the next epoch replaces it."""
    found: list[list[int]] = [[] for _ in range(workers)]

    def train(ctx: Context) -> None:
        model, optimizer = prepared(ctx)
        for _ in ctx.epochs(3):
            found[ctx.rank].append(ctx.global_step)
            kept = ctx.batches("train")
            for number, batch in enumerate(kept, 1):
                optimizer.zero_grad()
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if number == 5:
                    break

    loops = LocalRun(tmp_path, samples=SAMPLES).train(train, workers=workers)
    assert found == [[0, 5, 10]] * workers
    assert [loop.state.progress.step for loop in loops] == [15] * workers


def test_a_part_of_a_global_batch_does_not_reach_the_next_epoch(tmp_path: Path) -> None:
    """The loop leaves the first epoch with three of four micro-batches, and dies in the second."""
    seen: Counter[int] = Counter()
    gradients: list[bool] = []
    pending: list[int] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for epoch in ctx.epochs(2):
            gradients.append(any(parameter.grad is not None for parameter in model.parameters()))
            pending.clear()
            for number, batch in enumerate(ctx.batches("train"), 1):
                ctx.backward(loss_of(model, batch))
                pending.extend(batch["sample_id"].tolist())
                if ctx.step() and epoch == 1:
                    seen.update(pending)
                    pending.clear()
                if epoch == 0 and number == 3:
                    break
                if number == 4 and not ctx._loop.state.resumed:
                    commit(ctx)
                    raise Died

    run = LocalRun(tmp_path, samples=SAMPLES, sizes=BatchSize(initial=16, local=(1, 4)))
    run.train(train)
    run.train(train)
    assert gradients == [False] * 3
    assert seen == Counter(range(SAMPLES))


def test_one_iterator_over_all_passes_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    def forever(ctx: Context) -> Iterator[Any]:
        while True:
            yield from ctx.batches("train")

    seen: Counter[int] = Counter()

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        batches = forever(ctx)
        for _ in ctx.epochs(3):
            for _ in range(SAMPLES // 8):
                batch = next(batches)
                ctx.backward(loss_of(model, batch))
                ctx.step()
                seen.update(batch["sample_id"].tolist())

    (loop,) = LocalRun(tmp_path, samples=SAMPLES).train(train)
    assert seen == Counter(dict.fromkeys(range(SAMPLES), 3))
    assert loop.state.progress.step == 3 * SAMPLES // 8
