"""The loop of one worker, with a real hub and feed in this process."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from offload import collate
from offload.errors import RunError
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.testing.in_threads import (
    Died,
    LocalCheckpointer,
    LocalClient,
    LocalFeed,
    LocalHub,
    Ranks,
    Shelf,
    Unjoined,
)
from offload.train.config import Adaptation, BatchSize, Checkpoints
from offload.train.messages import TRAIN, Orders
from offload.train.worker import loop as loop_module
from offload.train.worker.batches import NoPeers
from offload.train.worker.context import Context
from offload.train.worker.goal import Goal
from offload.train.worker.loop import Place, TrainingLoop
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.state import TrainingState
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared

BATCH = 4


@pytest.fixture
def samples(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def loop(tmp_path: Path, samples: int) -> Iterator[TrainingLoop]:
    rows = list_torch_dataset(range(samples)).rows
    hub = LocalHub(
        {TRAIN: FeedDataset(recipe=None, rows=rows, shuffle=True, seed=0)},  # type: ignore[arg-type]
        Cores(nodes=("node",), task_cpus=1, stores={"node": 1e6}),
    )
    sizes = BatchSize(initial=BATCH)
    setup = WorkerSetup(
        hub=LocalClient(hub),
        split=sizes.split(1),
        batch_size=sizes,
        adaptation=Adaptation(),
        on_device={TRAIN: ()},
        collate_fn={},
        sized={TRAIN: samples},
        classes={},
        resumable={TRAIN: True},
        ordered={TRAIN: False},
        checkpoints=Checkpoints(every_s=None),
        precision="fp32",
        seed=0,
        hang_s=math.inf,  # its threads outlive the test, and the watchdog would end this process
        deterministic=False,
        config={},
    )
    place = Place(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        node="node",
        talk=None,
        peers={TRAIN: NoPeers()},
        checkpoints=LocalCheckpointer(Shelf(Path(tempfile.mkdtemp(dir=tmp_path))), Ranks(1), 0),
        join=Unjoined(),
        share=lambda tensors: None,
        feed=LocalFeed,
    )
    made = TrainingLoop(setup, place)
    model = torch.nn.Linear(1, 1)
    made.prepare([model, torch.optim.SGD(model.parameters(), lr=0.1)], None)
    yield made
    hub.nodes.close()


def train(loop: TrainingLoop, goal: Goal, *, drop_last: bool) -> None:
    model = loop.state.models[0]
    for batch in loop.steps(goal, lambda: loop.batches(TRAIN, drop_last=drop_last)):
        loop.backward(model(torch.ones(len(batch["sample_id"]), 1)).mean(), retain_graph=False)
        loop.step((), None)


@pytest.mark.parametrize("samples", [6], indirect=True)
def test_a_number_of_steps_takes_as_many_passes_as_it_needs(loop: TrainingLoop) -> None:
    train(loop, Goal(steps=3), drop_last=True)  # one batch in each pass
    assert (loop.state.progress.step, loop.epoch) == (3, 2)


@pytest.mark.parametrize("samples", [3], indirect=True)
def test_a_pass_that_delivers_no_batch_ends_a_number_of_steps(loop: TrainingLoop) -> None:
    with pytest.raises(RunError, match=r"epoch 1 delivered no batch: drop_last, filters or transforms left no"):
        train(loop, Goal(steps=3), drop_last=True)


@pytest.mark.parametrize("samples", [24], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        {"sized": {TRAIN: None}},
        {"yielded": frozenset([TRAIN])},
        {"collate_fn": {TRAIN: collate.pack(max_tokens=9)}},
    ],
    ids=["rows", "generator", "tokens"],
)
def test_batches_that_only_the_pass_counts_have_no_number(loop: TrainingLoop, change: dict[str, Any]) -> None:
    context = Context(loop)
    assert len(context.batches(TRAIN)) == 6
    loop.setup = replace(loop.setup, **change)
    with pytest.raises(TypeError, match="the number of batches is unknown"):
        len(context.batches(TRAIN))


@pytest.mark.parametrize("samples", [6], indirect=True)
def test_inputs_of_a_generator_are_no_measure_of_an_epoch_of_batches_that_adapt(loop: TrainingLoop) -> None:
    loop._goal = Goal(epochs=2)
    loop.scaling = MagicMock()
    for _ in range(5):  # six inputs made more samples than that
        loop.state.stepped([], BATCH, float(BATCH))
    assert loop._trained_enough(1)
    loop.setup = replace(loop.setup, yielded=frozenset([TRAIN]))
    assert [loop._trained_enough(epoch) for epoch in (1, 2)] == [False, True]


def test_a_parameter_without_a_shape_is_named_with_what_gives_it_one(tmp_path: Path) -> None:
    def train(ctx: Context) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        model[0].weight = torch.nn.parameter.UninitializedParameter()  # as in a lazy layer
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(
        RunError, match=r"a Sequential whose parameter '0.weight' has no shape yet\. Run the model once"
    ):
        LocalRun(tmp_path).train(train)


@pytest.mark.parametrize("samples", [6], indirect=True)
def test_workers_that_have_left_a_node_wait_for_another_however_long_that_takes(
    loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "RESIZE_DEADLINE_S", -1.0)  # it is over at once
    hub, looks = loop.setup.hub, 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            hub.publish(Orders(serial=2, workers=1, ends_group=1))
        loop.reporter.flush()

    loop.place = replace(loop.place, sleep=sleep)
    hub.publish(Orders(serial=1, workers=0, ends_group=1))
    loop.reporter.flush()
    with pytest.raises(RunError, match="Ray Train did not start the new number of workers"):
        loop._obey("resize")
    assert looks >= 3, "only workers that could be replaced have a deadline"


def test_all_workers_begin_with_the_weights_of_the_first(tmp_path: Path) -> None:
    """Those that DistributedDataParallel does not share: of several models, of a moving average, and what only an optimizer holds."""
    begun: dict[int, set[float]] = {}

    def train(ctx: Context) -> None:
        made = torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)
        temperature = torch.nn.Parameter(torch.zeros(()))
        for tensor in (temperature, *(each for model in made for each in (*model.parameters(), *model.buffers()))):
            tensor.data.fill_(ctx.rank)  # such as weights that NumPy draws, or that one worker has read
        average = torch.optim.swa_utils.AveragedModel(made[0])
        parameters = [*made[0].parameters(), *made[1].parameters(), temperature]
        *models, _ = ctx.prepare(*made, average, torch.optim.SGD(parameters, lr=0.1))
        tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
        begun[ctx.rank] = {each.item() for each in (temperature, *tensors)}

    LocalRun(tmp_path).train(train, workers=2)
    assert begun == {0: {0.0}, 1: {0.0}}


def test_a_second_loop_goes_on_to_its_own_goal(tmp_path: Path) -> None:
    """Such as a warm-up by steps before the epochs, also after a restart."""
    steps: list[tuple[int, int]] = []

    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)

        def step(batch: Any) -> None:
            ctx.backward(loss_of(model, batch))
            ctx.step()
            steps.append((ctx.epoch, ctx.global_step))
            if not ctx._loop.state.resumed and ctx.global_step == 6:
                commit(ctx)
                raise Died

        for goal in (3, 8):
            for batch in ctx.steps(goal):
                step(batch)
        for _ in ctx.epochs(4):
            for batch in ctx.batches(TRAIN):
                step(batch)

    run = LocalRun(tmp_path, samples=64)  # eight steps an epoch
    run.train(train)
    run.train(train)
    epochs = [0] * 3 + [1] * 5 + [2] * 8 + [3] * 8
    assert steps == [(epoch, number) for number, epoch in enumerate(epochs, 1)]


def test_a_loop_may_follow_one_whose_time_is_up(tmp_path: Path) -> None:
    def train(ctx: Context) -> None:
        model, _ = prepared(ctx)
        for batch in itertools.chain(ctx.steps(seconds=1e-9), ctx.steps(2)):
            ctx.backward(loss_of(model, batch))
            ctx.step()

    [loop] = LocalRun(tmp_path).train(train)
    assert loop.state.progress.step == 2


def test_the_state_of_an_optimizer_follows_its_model_to_the_device() -> None:
    """Adagrad makes its state at once, where the model is by then. Here, memory that does not exist stands for that of a GPU."""
    model = torch.nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["sum"] = torch.zeros(parameter.shape)
    checkpoints: Any = None
    state = TrainingState(None, checkpoints, seed=0, samples=None, scaler=None, resumable=True)
    state.adopt([model], [optimizer])
    assert {each["sum"].device.type for each in optimizer.state.values()} == {"meta"}


@pytest.mark.parametrize("prepares", [False, True])
def test_a_run_without_a_model_tells_of_no_checkpoint(tmp_path: Path, prepares: bool) -> None:
    """The run that resumes it would miss one that it was told of."""

    def train(ctx: Context) -> None:
        if prepares:
            prepared(ctx)
        for _ in ctx.epochs(1):
            for _ in ctx.batches(TRAIN):
                ctx.skip()

    [loop] = LocalRun(tmp_path).train(train)
    assert ("checkpoint" in {event.kind for event in loop.setup.hub.read(0).events}) is prepares
