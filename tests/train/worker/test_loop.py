"""The loop of one worker, with a real hub and feed in this process."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import collate
from offload.errors import RunError
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.report.events import ReadyToResize
from offload.train.checkpoints.storage import Storage
from offload.train.config import Adaptation, BatchSize, Checkpoints
from offload.train.messages import TRAIN, End
from offload.train.worker.assembly import training_loop
from offload.train.worker.context import Context
from offload.train.worker.ends import Ends, StopRun
from offload.train.worker.goal import Goal
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.loop import TrainingLoop
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.checkpointer import FolderCheckpointer
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.setup import DatasetSetup, WorkerSetup
from offload.train.worker.steps.batch_scaling import BatchScaling
from tests.emulation.in_threads import Died, LocalClient, LocalFeed, LocalHub, Unjoined
from tests.train.worker.local_runs import LocalRun, commit, loss_of, prepared

BATCH = 4


@contextlib.contextmanager
def local_loop(
    folder: Path, *, samples: int = 6, sleep: Callable[[float], None] = time.sleep, known: Mapping[str, Any] = {}
) -> Iterator[TrainingLoop]:
    """The loop of a single worker, with a prepared model. ``known``: what it knows of its training data, beside the usual."""
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
        datasets={TRAIN: DatasetSetup(**{"samples": samples, "resumable": True, "ordered": False, **known})},
        checkpoints=Checkpoints(every_s=None),
        storage=Storage(path=tempfile.mkdtemp(dir=folder)),
        name="run",
        precision="fp32",
        seed=0,
        hang_s=math.inf,  # its threads outlive the test, and the watchdog would end this process
        deterministic=False,
    )
    place = RankPlace(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        node="node",
        talk=NoPeers(),
        peers={TRAIN: NoPeers()},
        checkpoints=FolderCheckpointer(setup.storage, setup.name, setup.checkpoints, NoPeers()),
        join=Unjoined(),
        share=lambda tensors: None,
        feed=LocalFeed,
        sleep=sleep,
    )
    loop = training_loop(setup, place)
    model = torch.nn.Linear(1, 1)
    loop.prepare([model, torch.optim.SGD(model.parameters(), lr=0.1)], None)
    try:
        yield loop
    finally:
        hub.nodes.close()


def train(loop: TrainingLoop, goal: Goal, *, drop_last: bool) -> None:
    model = loop.state.models[0]
    for batch in loop.steps(goal, lambda: loop.batches(TRAIN, drop_last=drop_last)):
        loop.backward(model(torch.ones(len(batch["sample_id"]), 1)).mean(), retain_graph=False)
        loop.step((), None)


def test_a_number_of_steps_takes_as_many_passes_as_it_needs(tmp_path: Path) -> None:
    with local_loop(tmp_path, samples=6) as loop:
        train(loop, Goal(steps=3), drop_last=True)  # one batch in each pass
        assert (loop.state.progress.step, loop.epoch) == (3, 2)


def test_a_pass_that_delivers_no_batch_ends_a_number_of_steps(tmp_path: Path) -> None:
    with (
        local_loop(tmp_path, samples=3) as loop,
        pytest.raises(RunError, match=r"epoch 1 delivered no batch: drop_last, filters or transforms left no"),
    ):
        train(loop, Goal(steps=3), drop_last=True)


@pytest.mark.parametrize(
    "change",
    [{"samples": None}, {"yielded": True}, {"collate_fn": collate.pack(max_tokens=9)}],
    ids=["rows", "generator", "tokens"],
)
def test_batches_that_only_the_pass_counts_have_no_number(tmp_path: Path, change: dict[str, Any]) -> None:
    with local_loop(tmp_path, samples=24) as loop:
        assert len(Context(loop).batches(TRAIN)) == 6
    with (
        local_loop(tmp_path, samples=24, known=change) as loop,
        pytest.raises(TypeError, match="the number of batches is unknown"),
    ):
        len(Context(loop).batches(TRAIN))


@pytest.mark.parametrize(("yielded", "reached"), [(False, [True, True]), (True, [False, True])])
def test_inputs_of_a_generator_are_no_measure_of_an_epoch_of_batches_that_adapt(
    tmp_path: Path, yielded: bool, reached: list[bool]
) -> None:
    with local_loop(tmp_path, samples=6, known={"yielded": yielded}) as loop:
        sizes = BatchSize(initial=BATCH, max=4 * BATCH)
        ends = Ends(
            loop.setup,
            loop.place,
            state=loop.state,
            reporter=loop.reporter,
            watchdog=loop.watchdog,
            committer=loop.committer,
            scaling=BatchScaling(sizes, Adaptation(), workers=1),
        )
        ends.aim(Goal(epochs=2))
        for _ in range(5):  # six inputs made more samples than that
            loop.state.stepped([], BATCH, float(BATCH))
        assert [ends.reached(epoch) for epoch in (1, 2)] == reached


def test_a_parameter_without_a_shape_is_named_with_what_gives_it_one(tmp_path: Path) -> None:
    def train(ctx: Context) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        model[0].weight = torch.nn.parameter.UninitializedParameter()  # as in a lazy layer
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(
        RunError, match=r"a Sequential whose parameter '0.weight' has no shape yet\. Run the model once"
    ):
        LocalRun(tmp_path).train(train)


@pytest.mark.parametrize(("end", "events"), [("resize", 1), ("stop", 0)])
def test_workers_that_are_ordered_to_end_leave_the_function_and_say_for_what(
    tmp_path: Path, end: End, events: int
) -> None:
    with local_loop(tmp_path) as loop:
        with pytest.raises(StopRun) as unwound:
            loop.ends.obey(end)
        loop.reporter.flush()
        ready = [event for event in loop.setup.hub.read(0).events if isinstance(event, ReadyToResize)]
    assert unwound.value.end == end
    assert len(ready) == events


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
    state = TrainingState(NoPeers(), checkpoints, seed=0, samples=None, scaler=None, resumable=True)
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
