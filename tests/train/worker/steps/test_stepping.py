"""Steps of one or several ranks, in threads: what the optimizers see, and that replicas stay equal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.errors import RunError
from offload.measure.steps import StepClock, StepMeter
from offload.model.batch_split import BatchSplit
from offload.pipeline.order.ranges import Ranges
from offload.train.worker.data.batches import LocalBatch
from offload.train.worker.links.agreement import Agreed
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.steps.device_memory import DeviceMemory
from offload.train.worker.steps.joining import Distributed, Join
from offload.train.worker.steps.stepping import Stepper
from tests.emulation.in_threads import Ranks, Unjoined

ROWS = 4


class Rank:
    """One rank's steps, on batches that a test names by the rows of all ranks."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        rank: int = 0,
        workers: int = 1,
        join: Join | None = None,
        ddp: dict[str, Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        checkpoints: Any = None
        state = TrainingState(NoPeers(), checkpoints, seed=0, samples=None, scaler=scaler, resumable=True)
        state.objects.optimizers = list(optimizers)
        self.rank, self.workers = rank, workers
        self.stepper = Stepper(
            state,
            StepMeter(StepClock()),
            Watchdog(60.0),
            rank=rank,
            workers=workers,
            scaling=None,
            join=join or Unjoined(),
            memory=DeviceMemory(torch.device("cpu")),
        )
        self.models = self.stepper.join(models, ddp)

    def take(self, *rows: int, accum_steps: int = 0) -> None:
        """Take the next batch; ``rows``: those of each rank."""
        self.stepper.settle(0.0)
        mine, whole = (rows or (ROWS,))[self.rank], sum(rows or (ROWS,))
        self.stepper.begin_batch(
            LocalBatch(
                content={},
                rows=mine,
                all_rows=whole,
                weight=mine,
                all_weight=whole,
                positions=Ranges(((0, mine),)) if mine else Ranges(),
                skipped=(),
                own_ready_s=0.0,
                split=BatchSplit(workers=self.workers, local_batch_size=ROWS, accum_steps=accum_steps),
                agreed=Agreed(),
            )
        )

    def backward(self, loss: torch.Tensor, *, another: bool = False) -> None:
        self.stepper.backward(loss, lambda: another)

    def skip(self) -> None:
        self.stepper.skip(lambda: False)

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        self.stepper.step(optimizers, clip_norm=None, passes=0.0)


# -- fp16 --------------------------------------------------------------------------------------------------------------


def weight(value: float = 0.0) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def in_fp16() -> tuple[Rank, list[torch.nn.Linear], list[torch.optim.SGD], torch.amp.GradScaler]:
    """Two models with an optimizer each, whose steps are their gradients."""
    models = [weight(), weight()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    return Rank(models, optimizers, scaler=scaler), models, optimizers, scaler


ONE = torch.ones(1, 1)


@pytest.mark.parametrize("rest_at_once", [False, True])
def test_an_overflow_in_one_optimizer_leaves_the_step_of_another_as_it_is(rest_at_once: bool) -> None:
    rank, (first, second), (of_first, of_second), scaler = in_fp16()
    rank.take()
    rank.backward(first(ONE).sum() * float("inf"))
    rank.backward(second(ONE).sum())
    rank.step(of_first)
    rank.step(*() if rest_at_once else (of_second,))
    assert (first.weight.item(), second.weight.item()) == (0.0, -1.0)
    rank.stepper.settle(0.0)
    assert scaler.get_scale() == 512.0


def test_an_optimizer_without_gradients_rests_and_the_others_step() -> None:
    rank, (first, second), _, scaler = in_fp16()
    rank.take()
    rank.backward(first(ONE).sum())
    rank.step()
    assert (first.weight.item(), second.weight.item()) == (-1.0, 0.0)
    assert scaler.get_scale() == 1024.0


def test_a_step_of_what_is_left_may_have_nothing_left() -> None:
    rank, (first, second), optimizers, _ = in_fp16()
    for number in (1, 2):
        rank.take()
        for model, optimizer in zip((first, second), optimizers, strict=True):
            rank.backward(model(ONE).sum())
            rank.step(optimizer)
        rank.step()
        assert (first.weight.item(), second.weight.item()) == (-number, -number)


def test_an_optimizer_steps_twice_in_a_batch_and_an_overflow_does_not_change_later_steps() -> None:
    rank, (first, second), (of_first, of_second), scaler = in_fp16()
    rank.take()
    rank.backward(second(ONE).sum())
    rank.backward(first(ONE).sum() * float("inf"))
    rank.step(of_first)
    for _ in range(2):
        rank.backward(first(ONE).sum())
        rank.step(of_first)
    rank.step(of_second)
    assert (first.weight.item(), second.weight.item()) == (-2.0, -1.0)
    assert scaler.get_scale() == 512.0


def test_the_gradient_of_a_parameter_that_two_optimizers_share_is_unscaled_once() -> None:
    model = weight()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (1.0, 0.5)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    rank = Rank([model], optimizers, scaler=scaler)
    rank.take()
    rank.backward(model(ONE).sum() * 4.0)
    rank.step()
    assert model.weight.item() == -6.0


def test_a_scaler_of_the_loops_own_may_leave_a_step_out() -> None:
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rank = Rank([model], [optimizer])
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        rank.take()
        optimizer.zero_grad()
        scaler.scale(model(ONE).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert rank.stepper.settle(0.0) == ROWS
    assert model.weight.item() == -2.0
    assert rank.stepper._state.progress.step == 4, "the batches left out count, too"


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_batch_of_samples_without_tokens_weighs_nothing(factor: float) -> None:
    model = weight()
    rank = Rank([model], [torch.optim.SGD(model.parameters(), lr=1.0)])
    rank.take()
    assert rank.stepper.batch is not None
    rank.stepper.batch.weight = rank.stepper.batch.all_weight = 0  # as the texts of a batch may all be empty
    rank.backward(model(ONE).sum() * factor)
    rank.step()
    assert model.weight.item() == 0.0
    rank.take()
    rank.backward(model(ONE).sum())
    rank.step()
    assert model.weight.item() == -1.0


class Full(torch.optim.SGD):
    """An optimizer for which the device's memory does not suffice."""

    def step(self, closure: Any = None) -> Any:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("plain", [False, True])
def test_an_optimizer_that_fails_within_its_step_is_known_to_be_half_updated(plain: bool) -> None:
    """A checkpoint must not hold it."""
    for kind in (torch.optim.SGD, Full):
        model = weight()
        optimizer = kind(model.parameters(), lr=1.0)
        rank = Rank([model], [optimizer])
        rank.take()
        rank.backward(model(ONE).sum())
        assert not rank.stepper.stepping
        with contextlib.suppress(torch.OutOfMemoryError):
            optimizer.step() if plain else rank.step()
        assert rank.stepper.stepping == (kind is Full)


def test_a_batch_with_which_the_loop_does_nothing_is_an_error() -> None:
    model = weight()
    rank = Rank([model], [torch.optim.SGD(model.parameters(), lr=1.0)])
    rank.take()
    model(ONE).sum().backward()
    with pytest.raises(
        RunError, match=r"took the next batch without ctx.step\(\)\..* To accumulate .* as batch_size.* A GradScaler of"
    ):
        rank.take()


@pytest.mark.parametrize("clears", ["before", "after"])
def test_a_loop_may_clear_gradients_as_a_plain_one_does_while_they_accumulate(clears: str) -> None:
    """Such as one whose batches did not fit into the device's memory."""
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank = Rank([model], [optimizer])
    for factor in (1.0, 2.0, 6.0):
        rank.take(accum_steps=2)
        if clears == "before":
            optimizer.zero_grad()
        rank.backward(model(ONE).sum() * factor, another=factor < 6.0)
        rank.step()
        if clears == "after":
            model.zero_grad()
    assert model.weight.item() == pytest.approx(-3.0)


def test_a_loop_that_overwrites_gradients_while_they_accumulate_is_told() -> None:
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank = Rank([model], [optimizer])
    rank.take(accum_steps=1)
    rank.backward(model(ONE).sum(), another=True)
    rank.step()
    rank.take(accum_steps=1)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RunError, match="the loop changes gradients between the micro-batches of a global batch"):
        rank.backward(model(ONE).sum())


def test_an_optimizer_that_is_named_steps_several_times_on_a_batch() -> None:
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank = Rank([model], [optimizer])
    rank.take()
    for _ in range(3):
        rank.backward(model(ONE).sum())
        rank.step(optimizer)
    assert model.weight.item() == -3.0
    rank.step()
    for call in (lambda: rank.backward(model(ONE).sum()), rank.step):
        with pytest.raises(
            RunError, match=r"To step several times on one batch, name the optimizer: ctx.step\(optimizer\)"
        ):
            call()


@pytest.mark.parametrize("plain", [False, True])
def test_a_loop_whose_optimizer_is_not_prepared_is_told(plain: bool) -> None:
    model = weight()
    rank = Rank([model], [])
    rank.take()
    rank.backward(torch.zeros((), requires_grad=True))
    rank.step()  # a loop that trains nothing needs none
    rank.take()
    if plain:
        model(ONE).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    else:
        rank.backward(model(ONE).sum())
    with pytest.raises(RunError, match=r"ctx.prepare got no optimizer, .* Pass it along"):
        rank.take() if plain else rank.step()


@pytest.mark.parametrize("plain", [False, True])
def test_a_loop_that_prepares_nothing_is_told(plain: bool) -> None:
    model = weight()
    rank = Rank([], [])
    rank.take()
    rank.skip()  # a loop that trains nothing needs no model
    rank.take()
    if plain:
        model(ONE).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.raises(RunError, match=r"ctx.prepare was not called, so that no step trains the model"):
        rank.take() if plain else rank.backward(model(ONE).sum())


@pytest.mark.parametrize("most", [None, 1.0])
def test_a_parameter_that_two_optimizers_share_is_stepped_by_both(most: float | None) -> None:
    """As in a plain loop that clips the gradient, steps both, and then clears the gradients."""
    model = weight()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (1.0, 0.5)]
    rank = Rank([model], optimizers)
    rank.take()
    rank.backward(model(ONE).sum() * 4.0)
    rank.stepper.step((), clip_norm=most, passes=0.0)
    assert model.weight.item() == pytest.approx(-1.5 * (4.0 if most is None else most))
    assert model.weight.grad is None


# -- several ranks -----------------------------------------------------------------------------------------------------


class InThreads:
    """Joins the models of ranks that are threads. As with DistributedDataParallel, the parameters that need gradients when a model is
    joined exchange them during backward."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def wrap(
        self,
        model: torch.nn.Module,
        *,
        ready: Callable[[], None],
        weight: Callable[[], float],
        options: Mapping[str, Any],
    ) -> torch.nn.Module:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: self._mean(gradient * weight()))
        return model

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        for gradient in gradients:
            gradient.copy_(self._mean(gradient))

    def _mean(self, gradient: torch.Tensor) -> torch.Tensor:
        told = self._ranks.gather(self._rank, gradient.clone())
        return torch.stack(told).mean(0)


def on_two(train: Callable[[int, InThreads], Sequence[torch.nn.Module]]) -> list[list[float]]:
    """Run a loop on two ranks. Return the weights of each rank's models."""
    ranks = Ranks(2)

    def work(rank: int) -> list[float]:
        try:
            models = train(rank, InThreads(ranks, rank))
            return [x for model in models for p in model.parameters() for x in p.detach().reshape(-1).tolist()]
        except threading.BrokenBarrierError:
            return []  # the other rank raises the cause
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("frozen", ["body", "all"])
def test_layers_unfrozen_after_prepare_stay_equal_on_all_ranks(plain: bool, frozen: str) -> None:
    """The step is that of one worker, which sees the rows of both ranks."""

    def model() -> torch.nn.Sequential:
        made = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.constant_(made[0].weight, 0.5)
        torch.nn.init.constant_(made[1].weight, 0.25)
        return made

    inputs = torch.arange(4.0)[:, None]
    rows = (3, 1)

    def train(rank: int, join: InThreads) -> list[torch.nn.Module]:
        trained = model()
        (trained if frozen == "all" else trained[0]).requires_grad_(False)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        loop = Rank([trained], [optimizer], rank=rank, workers=2, join=join, ddp={})
        trained.requires_grad_(True)
        for _ in range(2):
            loop.take(*rows)
            loss = trained(inputs[:3] if rank == 0 else inputs[3:]).square().mean()
            if plain:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                loop.backward(loss)
                loop.step()
        return [trained]

    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        alone(inputs).square().mean().backward()
        optimizer.step()
    expected = [p.item() for p in alone.parameters()]
    assert on_two(train) == [pytest.approx(expected), pytest.approx(expected)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_loss_of_a_filler_does_not_matter_even_if_it_is_not_finite(loss: float, plain: bool) -> None:
    """Such as a mean over the tokens that count, of which two rows may have none."""

    def train(rank: int, join: InThreads) -> list[torch.nn.Module]:
        model = weight(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loop = Rank([model], [optimizer], rank=rank, workers=2, join=join)
        loop.take(2, 0)
        made = model(ONE).mean() * (1.0 if rank == 0 else loss)
        if plain:
            made.backward()
            optimizer.step()
        else:
            loop.backward(made)
            loop.step()
        return [model]

    assert on_two(train) == [[0.5], [0.5]]


def test_a_parameter_that_no_rank_used_stays_as_it_is() -> None:
    """As on one worker: weight decay and momentum move only what has a gradient."""

    def train(rank: int, join: InThreads) -> list[torch.nn.Module]:
        heads = [weight(1.0) for _ in range(3)]
        model = torch.nn.ModuleList(heads)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        loop = Rank([model], [optimizer], rank=rank, workers=2, join=join)
        for _ in range(2):
            loop.take(2, 2)
            loop.backward(sum((head(ONE).mean() for head in heads[: 1 + rank]), torch.zeros(())))
            loop.step()
        return heads

    first, second = on_two(train)
    assert first == second
    assert first[0] < first[2]
    assert first[1] < first[2], "used on one rank"
    assert first[2] == 1.0


@pytest.mark.parametrize(
    ("rows", "skips", "factor", "steps"),
    [
        ((2, 0), (True, False), 1.0, False),  # the other rank has a filler
        ((2, 2), (True, True), 1.0, False),
        ((2, 2), (True, False), 1.0, True),
        ((2, 2), (True, False), 0.0, True),  # samples count whose gradient is zero
        ((2, 0), (False, True), 1.0, True),
    ],
)
def test_all_ranks_step_or_none_if_some_skip(
    rows: tuple[int, int], skips: tuple[bool, bool], factor: float, steps: bool
) -> None:
    before: list[float] = []

    def train(rank: int, join: InThreads) -> list[torch.nn.Module]:
        model = weight(1.0)
        # Adam moves without a gradient, too.
        loop = Rank([model], [torch.optim.Adam(model.parameters(), lr=0.1)], rank=rank, workers=2, join=join)
        for _ in range(2):
            loop.take(2, 2)
            loop.backward(model(ONE).mean())
            loop.step()
        before.append(model.weight.item())
        loop.take(*rows)
        if skips[rank]:
            loop.skip()
        else:
            loop.backward(model(ONE).mean() * factor)
        loop.step()
        return [model]

    first, second = on_two(train)
    assert first == second
    assert (first[0] != before[0]) == steps


@pytest.mark.parametrize("plain", [False, True])
def test_a_worker_that_skips_a_batch_repeats_the_steps_of_the_last_one(plain: bool) -> None:
    """Those of two models, one after the other: each exchanges gradients with the other workers."""

    def train(rank: int, join: InThreads) -> list[torch.nn.Module]:
        models = [weight(1.0), weight(1.0)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
        loop = Rank(models, optimizers, rank=rank, workers=2, join=join)
        for number in range(2):
            loop.take(2, 2)
            if number == 1 and rank == 0:
                loop.skip()
                continue
            for model, optimizer in zip(models, optimizers, strict=True):
                if plain:
                    optimizer.zero_grad()
                    model(ONE).mean().backward()
                    optimizer.step()
                else:
                    loop.backward(model(ONE).mean())
                    loop.step(optimizer)
        loop.stepper.settle(0.0)
        return models

    assert on_two(train) == [[0.25, 0.25], [0.25, 0.25]]


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counting(Distributed):
    """Counts the buckets of gradients that DistributedDataParallel exchanges during backward."""

    def __init__(self) -> None:
        self.exchanged = 0

    def wrap(self, model: torch.nn.Module, *, ready: Callable[[], None], **options: Any) -> torch.nn.Module:
        def counted() -> None:
            self.exchanged += 1
            ready()

        return super().wrap(model, ready=counted, **options)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("micro_batches", "exchanged"), [(3, [0, 0, 1]), (2, [0, 1])])
def test_gradients_are_exchanged_with_the_last_micro_batch_alone(micro_batches: int, exchanged: list[int]) -> None:
    """A pass may end within a global batch of three micro-batches."""
    model, join = weight(), Counting()
    rank = Rank([model], [torch.optim.SGD(model.parameters(), lr=1.0)], workers=2, join=join, ddp={})
    counted = []
    for left in reversed(range(micro_batches)):
        rank.take(ROWS, ROWS, accum_steps=2)
        rank.backward(rank.models[0](ONE).sum(), another=left > 0)
        counted.append(join.exchanged)
        rank.step()
    assert counted == exchanged
    assert model.weight.item() == pytest.approx(-1.0)


@pytest.mark.usefixtures("group")
def test_gradients_of_a_loss_that_does_not_come_from_the_joined_model_are_exchanged_too() -> None:
    """Such as that of ``model.module.loss(batch)``. Otherwise the replicas would differ from then on."""
    model, join = weight(), Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank = Rank([model], [optimizer], workers=2, join=join, ddp={})
    rank.take(ROWS, ROWS)
    with torch.no_grad():
        rank.models[0](ONE)
    rank.backward(model(ONE).sum())
    assert join.exchanged == 1
    rank.step()
    assert model.weight.item() == pytest.approx(-1.0)
    rank.take(ROWS, ROWS)
    model(ONE).sum().backward()
    with pytest.raises(RunError, match=r"the loop's loss did not come from a call of the model.*ddp=False"):
        optimizer.step()


# -- closures ----------------------------------------------------------------------------------------------------------


def closure_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(ONE) - 1).square().mean()
        loss.backward()
        return loss

    return closure


def test_an_optimizer_that_needs_a_closure_steps_by_itself_on_one_worker() -> None:
    model = weight()
    optimizer = torch.optim.LBFGS(model.parameters())
    loop = Rank([model], [optimizer])
    loop.take()
    optimizer.step(closure_of(model, optimizer))
    assert model.weight.item() == pytest.approx(1.0)
    assert loop.stepper.settle(0.0) == ROWS
    loop.take()
    loop.backward(model(ONE).mean())
    with pytest.raises(RunError, match=r"ctx.step\(\) cannot step LBFGS: it needs a closure.*one worker.*such as Adam"):
        loop.step()


@pytest.mark.parametrize(("kind", "ddp"), [(torch.optim.SGD, None), (torch.optim.LBFGS, {}), (torch.optim.LBFGS, None)])
def test_a_closure_on_several_workers_is_refused(kind: Any, ddp: Any) -> None:
    model = weight()
    optimizer = kind(model.parameters(), lr=1.0)
    loop = Rank([model], [optimizer], workers=2, ddp=ddp)
    for named in (False, True):
        loop.stepper.batch = None
        loop.take(2, 2)
        closure = closure_of(model, optimizer)
        with pytest.raises(RunError, match=rf"the loop calls {kind.__name__}.step\(closure\), and 2 workers"):
            optimizer.step(closure=closure) if named else optimizer.step(closure)
    assert model.weight.item() == 0.0


def test_a_closure_is_allowed_where_backward_exchanges_all_gradients() -> None:
    def train(rank: int, join: InThreads) -> list[torch.nn.Module]:
        model = weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loop = Rank([model], [optimizer], rank=rank, workers=2, join=join, ddp={})
        loop.take(2, 2)
        optimizer.step(closure_of(model, optimizer))
        return [model]

    assert on_two(train) == [[1.0], [1.0]]
