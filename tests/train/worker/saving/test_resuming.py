"""What a resumed run does as the run that it goes on with would have done."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.train.config import BatchSize
from offload.train.worker.context import Context
from offload.train.worker.saving.training_state import seed_at_start, seed_at_step
from tests.emulation.in_threads import Died
from tests.train.worker.local_runs import UNLABELED, VAL, LocalRun, commit, loss_of, prepared

SAMPLES = 60


@pytest.mark.parametrize("resumed_with", [1, 2])
def test_a_schedule_over_all_batches_goes_on_after_a_restart_within_an_epoch(tmp_path: Path, resumed_with: int) -> None:
    """A linear decay over ``epochs * len(...)`` steps reaches 0 with the last step."""
    rates: list[float] = []
    lengths: list[tuple[int, int]] = []

    def train(ctx: Context, *, dies: bool = False) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        steps = 3 * len(ctx.batches("train"))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        for _ in ctx.epochs(3):
            batches = ctx.batches("train")
            expected = len(batches)
            for number, batch in enumerate(batches, 1):
                if ctx.rank == 0:
                    rates.append(float(scheduler.get_last_lr()[0]))
                ctx.backward(loss_of(model, batch))
                ctx.step()
                scheduler.step()
                if dies and number == 5:
                    commit(ctx)
                    raise Died
            lengths.append((expected, number))

    run = LocalRun(tmp_path, samples=SAMPLES)
    run.train(lambda ctx: train(ctx, dies=True))
    run.train(train, workers=resumed_with)
    steps = 3 * 8
    assert rates == pytest.approx([1 - step / steps for step in range(steps)])
    assert set(lengths) == {(3, 3), (8, 8)}, "the rest of the interrupted epoch, then whole ones"


def every_pass(folder: Path, *, every: int, before: int, dies_at: int | None) -> dict[Any, list[int]]:
    """The order of each pass over other data sets, by its place in the script: before the epochs, every few steps within them, and after
    them. A run that dies goes on, and comes by some places again: their orders must be the same."""
    found: dict[Any, list[int]] = {}

    def visit(ctx: Context, *place: Any) -> None:
        for name in (VAL, UNLABELED):
            order = [i for batch in ctx.batches(name) for i in batch["sample_id"].tolist()]
            assert found.setdefault((name, *place), order) == order, place

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for number in range(before):
            visit(ctx, "before", number)
        for epoch in ctx.epochs(2):
            trained: list[int] = []
            for batch in ctx.batches("train"):
                trained += batch["sample_id"].tolist()
                ctx.backward(loss_of(model, batch))
                ctx.step()
                if ctx.global_step % every == 0:
                    visit(ctx, "step", ctx.global_step)
                if ctx.global_step == dies_at and not ctx._loop.state.resumed:
                    commit(ctx)
                    raise Died
            visit(ctx, "end", epoch)
            if dies_at is None:
                found["train", epoch] = trained
        visit(ctx, "after")

    run = LocalRun(folder, samples=SAMPLES)
    for _ in range(1 if dies_at is None else 2):
        run.train(train)
    return found


@given(every=st.integers(1, 9), before=st.integers(0, 2), dies_at=st.integers(1, 15))
@settings(max_examples=10, deadline=None)
def test_each_pass_over_a_shuffled_data_set_has_an_order_of_its_own_which_outlives_a_restart(
    every: int, before: int, dies_at: int
) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        whole = every_pass(Path(first), every=every, before=before, dies_at=None)
        parts = every_pass(Path(second), every=every, before=before, dies_at=dies_at)
    assert parts == {place: order for place, order in whole.items() if place[0] != "train"}
    assert all(order == list(range(SAMPLES)) for place, order in whole.items() if place[0] == VAL)
    shuffled = [order for place, order in whole.items() if place[0] != VAL]
    assert all(sorted(order) == list(range(SAMPLES)) for order in shuffled)
    assert len({tuple(order) for order in shuffled}) == len(shuffled)


def test_a_pass_that_a_restart_interrupts_begins_again_with_the_same_order(tmp_path: Path) -> None:
    pairs: list[list[int]] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(2):
            pairs.append([])
            for batch, other in zip(ctx.batches("train"), ctx.batches(UNLABELED), strict=False):
                pairs[-1] += other["sample_id"].tolist()
                ctx.backward(loss_of(model, batch))
                ctx.step()
                if not ctx._loop.state.resumed and ctx.global_step == 11:
                    commit(ctx)
                    raise Died

    run = LocalRun(tmp_path, samples=SAMPLES)
    run.train(train)
    run.train(train)
    first, broken_off, rest = pairs
    assert len(first) == SAMPLES
    assert broken_off == rest[: len(broken_off)] != first[: len(broken_off)]


def test_parameters_that_only_an_optimizer_holds_go_on_too(tmp_path: Path) -> None:
    """A temperature, and a loss that has weights and is not prepared."""
    seen: list[list[float]] = []

    def train(ctx: Context) -> None:
        model, temperature, loss = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(())), torch.nn.Linear(1, 1)
        loose = [temperature, *loss.parameters()]
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": loose}], lr=0.1)
        model, optimizer = ctx.prepare(model, optimizer)
        seen.append([each.item() for each in loose])
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward((loss(model(torch.ones(len(batch["sample_id"]), 1))) * temperature).mean())
                ctx.step()
                if not ctx._loop.state.resumed and ctx.global_step == 3:
                    commit(ctx)
                    seen.append([each.item() for each in loose])
                    raise Died

    run = LocalRun(tmp_path, samples=SAMPLES)
    run.train(train)
    run.train(train)
    first, at_checkpoint, resumed = seen
    assert resumed == at_checkpoint != first


@pytest.mark.parametrize("workers", [1, 2])
def test_sums_over_samples_without_ids_outlive_a_commit_and_begin_again_with_the_epoch(
    tmp_path: Path, workers: int
) -> None:
    """As with a Dataset that Ray Data executes: nobody knows which of an interrupted epoch's samples were trained."""
    sums: list[dict[str, float]] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            for number, batch in enumerate(ctx.batches("train"), 1):
                ctx.backward(loss_of(model, batch))
                ctx.step()
                ctx.accumulate(rows=ctx.rows)
                if number == 3:
                    commit(ctx)
                if number == 5 and not ctx._loop.state.resumed:
                    raise Died
            total = ctx.accumulated()
            if ctx.rank == 0:
                sums.append(total)

    run = LocalRun(tmp_path, samples=SAMPLES, resumable=False)
    run.train(train, workers=workers)
    run.train(train, workers=workers)
    assert sums == [{"rows": SAMPLES}]


@pytest.mark.parametrize(("sizes", "local"), [(8, 8), (16, 4)])
def test_the_number_of_batches_leaves_out_those_that_are_dropped(tmp_path: Path, sizes: int, local: int) -> None:
    lengths: list[tuple[int, int]] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            batches = ctx.batches("train", drop_last=True)
            came = 0
            for batch in batches:
                came += 1
                ctx.backward(loss_of(model, batch))
                ctx.step()
            lengths.append((len(batches), came))

    LocalRun(tmp_path, samples=62, sizes=BatchSize(initial=sizes, local=(1, local))).train(train)
    assert lengths == [(62 // local, 62 // local)]


def fitting() -> list[Any]:
    model = torch.nn.Linear(1, 1)
    return [model, torch.optim.SGD(model.parameters(), lr=0.1)]


def with_a_scheduler() -> list[Any]:
    model, optimizer = fitting()
    return [model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def of_another_shape() -> list[Any]:
    model = torch.nn.Linear(3, 1)
    return [model, torch.optim.SGD(model.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (
            of_another_shape,
            r"script: Error\(s\) in loading state_dict for Linear: size mismatch for weight: .* Restore",
        ),
        (lambda: [*fitting(), *fitting()], "trained models is 1 in the checkpoint, and 2 in ctx.prepare. Restore"),
        (lambda: fitting()[:1], "optimizers is 1 in the checkpoint, and 0 in ctx.prepare. Restore"),
        (with_a_scheduler, "other objects is 0 in the checkpoint, and 1 in ctx.prepare. Restore"),
    ],
)
def test_a_script_that_does_not_fit_its_checkpoint_is_told_what_differs(
    tmp_path: Path, now: Callable[[], list[Any]], text: str
) -> None:
    def train(ctx: Context) -> None:
        model, _ = ctx.prepare(*fitting())
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                ctx.step()
                commit(ctx)
                raise Died

    run = LocalRun(tmp_path)
    run.train(train)
    with pytest.raises(ConfigError, match=text):
        run.train(lambda ctx: ctx.prepare(*now()))


def draws() -> tuple[float, float, float]:
    """A number from each generator of this process."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_a_run_that_goes_on_with_more_workers_draws_other_numbers_on_each(tmp_path: Path) -> None:
    """Threads share the process's generators, so that each rank prepares and draws by itself."""
    alone = threading.Lock()
    drawn: dict[int, list[tuple[float, float, float]]] = {1: [], 3: []}

    def train(ctx: Context) -> None:
        with alone:
            seed_at_start(0, ctx.rank)
            model, _ = prepared(ctx)
            drawn[ctx.world_size].append(draws())
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                ctx.step()
                if ctx.global_step == 2:
                    commit(ctx)
                    raise Died

    run = LocalRun(tmp_path, samples=SAMPLES)
    run.train(train)
    run.train(train, workers=3)
    every = [*drawn[1], *drawn[3]]
    assert len(every) == 4
    for numbers in zip(*every, strict=True):
        assert len(set(numbers)) == 4


def test_seeds_determine_every_generator() -> None:
    def both(seed: int, rank: int) -> list[tuple[float, float, float]]:
        seed_at_start(seed, rank)
        first = draws()
        seed_at_step(seed, rank, 5)
        return [first, draws()]

    for seed in (0, -3, 2**53):
        assert both(seed, 0) == both(seed, 0)
        for one, other in zip(both(seed, 0), both(seed, 1), strict=True):
            assert one[1:] != other[1:]
    seed_at_start(0, 0)
    first = torch.rand(())
    seed_at_start(0, 1)
    assert torch.rand(()) == first, "all ranks build the same model"


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        (BatchSize(initial=8), 8),
        (BatchSize(initial=8, max=128), 64),
        (BatchSize(initial=8, max=32), 32),
        (BatchSize(initial=8, max=128, local=(1, 16)), 16),
    ],
)
def test_an_adapted_run_goes_on_within_the_sizes_of_the_script(tmp_path: Path, sizes: BatchSize, rows: int) -> None:
    """The run before has come to batches of 64 samples."""
    seen: set[int] = set()

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                seen.add(ctx.rows)
                ctx.backward(loss_of(model, batch))
                if ctx.step() and not ctx._loop.state.resumed:
                    commit(ctx)
                    raise Died

    run = LocalRun(tmp_path, samples=512, sizes=BatchSize(initial=64, max=128))
    run.train(train)
    assert seen == {64}
    seen.clear()
    run.sizes = sizes
    run.train(train)
    assert max(seen) == rows
