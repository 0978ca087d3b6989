"""The loop of one worker: batches, steps, and everything between two steps.

It opens passes, agrees with the other ranks on ends and commits, counts progress, follows the driver's orders and reports to the hub.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from offload.errors import RunError
from offload.measure.steps import Clock, CudaClock, StepMeter
from offload.model.batch_split import BatchSplit
from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import pass_number
from offload.report.events import (
    FirstBatch,
    FirstStep,
    MetricsReported,
    PassesDiffer,
    PassNotFinished,
    ReadyToResize,
    Rebatched,
    SampleSkipped,
    StoppedEarly,
    WorkersResumed,
)
from offload.train.checkpoints.sharded import is_part, is_sharded
from offload.train.hub.client import HubClient
from offload.train.messages import TRAIN, End, GroupStart, GroupStatus
from offload.train.worker.agreement import OVERS, Heard, Mailbox, NoAgreement, Over, TrainingAgreement
from offload.train.worker.batch import shown_batch
from offload.train.worker.batch_scaling import BatchScaling
from offload.train.worker.batches import Batches, Cutting, LocalBatch, Peers
from offload.train.worker.checkpointer import Checkpointer
from offload.train.worker.committing import Committer
from offload.train.worker.cutting import Budget, Cut, Skipped
from offload.train.worker.delivery import Delivery
from offload.train.worker.device_memory import DeviceMemory, DeviceMemoryError
from offload.train.worker.feed_client import FeedClient, HubFeed
from offload.train.worker.goal import Goal
from offload.train.worker.joining import Join
from offload.train.worker.peers import Talk
from offload.train.worker.reporter import Reporter
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.state import TrainingState
from offload.train.worker.stepping import Stepper
from offload.train.worker.watchdog import Watchdog

OUTSIDE = -1  # in the place of an epoch's number, for passes before and after the epochs
RESIZE_DEADLINE_S = 600.0
WAIT_S = 0.2


class StopRun(BaseException):
    """Unwinds the user's function after the last commit of a run that was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in its group, and its connections to the outside.

    Args:
        rank, world_size: the rank of this worker, and the number of workers.
        device: the device of the model and the batches.
        node: the id of this worker's node.
        talk: connects the training threads of all ranks; None if there is one worker.
        peers: connect the ranks' threads that cut batches, by data set.
        checkpoints: keeps the run's checkpoints.
        join: joins models with those of the other workers.
        share: copies rank 0's values of tensors to all ranks.
        feed: makes a client that reads blocks from the hub.
        sleep: waits for a number of seconds. A rehearsal ends a worker there.
        report_every_s: the seconds between two reports to the hub.
    """

    rank: int
    world_size: int
    device: torch.device
    node: str
    talk: Talk | None
    peers: Mapping[str, Peers]
    checkpoints: Checkpointer
    join: Join
    share: Callable[[Iterable[torch.Tensor]], None]
    feed: Callable[[HubClient, DirectBlocks], FeedClient] = HubFeed
    sleep: Callable[[float], None] = time.sleep
    report_every_s: float = 2.0


class TrainingLoop:
    """The link between a user's loop and the rest of the run, on one worker.

    It uses neither Ray nor torch.distributed directly: ``place`` holds the parts that do.

    Attributes:
        epoch: the current epoch, from 0.
        rows: the number of real samples in the user's current batch.
    """

    def __init__(self, setup: WorkerSetup, place: Place) -> None:
        self.setup, self.place = setup, place
        self.rank, self.world_size, self.device, self.talk = place.rank, place.world_size, place.device, place.talk
        self.epoch = self.rows = 0
        self.direct = DirectBlocks(setup.hub)
        names = sorted(setup.sized)
        start = setup.hub.begin_group() if self.rank == 0 else None
        if self.talk is not None:
            start = self.talk.broadcast(start, 0)
        assert start is not None
        self.attempt = start.attempt
        self.watchdog = Watchdog(setup.hang_s)
        self.reporter = Reporter(
            setup.hub, self.rank, start, self.watchdog, node=place.node, interval_s=place.report_every_s
        )
        self.meter = StepMeter(CudaClock(torch) if self.device.type == "cuda" else Clock())
        self.state = TrainingState(
            self.talk,
            place.checkpoints,
            seed=setup.seed,
            scaler=torch.amp.GradScaler(self.device.type) if setup.precision == "fp16" else None,
            samples=setup.sized[TRAIN],
            source=setup.source,
            resumable=setup.resumable[TRAIN],
        )
        self._template: dict[str, Cut] = {}
        self._visits = dict.fromkeys(names, 0)
        self._visited_epoch = -1
        self._in_epoch = False
        self._running: Batches | None = None  # of the training pass
        self._goal = Goal(epochs=1)
        self._over: Over = ""
        self._pass_ended = False
        self._went_on: tuple[int, ...] = ()
        self._scheduled: int | None = self.world_size
        self._reported: dict[str, float] = {}
        self._reported_at: dict[str, int] = {}  # the step that each metric is about
        self.scaling = (
            BatchScaling(setup.batch_size, setup.adaptation, workers=self.world_size)
            if setup.batch_size.adaptive
            else None
        )
        self.committer = Committer(
            setup.checkpoints,
            self.state,
            self.reporter,
            self.watchdog,
            rank=self.rank,
            failures_per_s=start.failures_per_s,
        )
        self.stepper = Stepper(
            self.state,
            self.meter,
            self.watchdog,
            rank=self.rank,
            workers=self.world_size,
            scaling=self.scaling,
            join=place.join,
            memory=DeviceMemory(self.device),
        )
        self.state.load()
        self._split = self._first_split(start)
        self._changes = 0
        self._pass_rows = 0
        self._passed: Counter[str] = Counter()  # this epoch's passes over other data sets
        self._begun: Counter[str] = Counter()  # the same, with those before a restart
        self._outside: Counter[str] = Counter()  # their passes outside of epochs
        self._told_passes = False
        self._first_step = True
        self._resume()
        self.reporter.flush()  # the driver should know this worker's node if it dies soon

    # -- model -----------------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], ddp: Mapping[str, Any] | None) -> list[Any]:
        """See :meth:`Context.prepare`. Returns the objects, with trained models joined."""
        if self.state.models:
            raise RunError("ctx.prepare was called twice. Prepare all models and their optimizers in one call.")
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        # Others, such as a moving average of the weights, are kept and restored, but have no gradients to exchange.
        trained = [module for module in modules if any(id(p) in held for p in module.parameters())] or modules[:1]
        if self.scaling is not None and len(trained) > 1:
            raise RunError(
                f"ctx.prepare got {len(trained)} trained models, and the batch size adapts to the gradient of one. Pass a fixed batch_size."
            )
        if self.scaling is not None and any(map(is_sharded, trained)):
            raise RunError(
                "ctx.prepare got a model that fully_shard has sharded, and the batch size adapts to the gradient of a whole one. Pass a "
                "fixed batch_size."
            )
        for module in modules:
            lazy = next(
                (name for name, p in module.named_parameters() if isinstance(p, torch.nn.UninitializedParameter)), None
            )
            if lazy is not None:
                raise RunError(
                    f"ctx.prepare got a {type(module).__name__} whose parameter {lazy!r} has no shape yet. Run the model once before, "
                    "on an input of the shape that it will get: the first forward pass gives a lazy layer its shape."
                )
            module.to(self.device)
        self.state.adopt(
            [_plain(module) for module in trained], [each for each in objects if not any(each is m for m in trained)]
        )
        if self.scaling is not None:
            self.scaling.adopt(self.state.optimizers)
        joined = self.stepper.join(trained, ddp)
        if not self.state.resumed:
            self._share_weights(modules, [t for t, j in zip(trained, joined, strict=True) if j is not t])
            torch.manual_seed(
                self.setup.seed + self.rank
            )  # the same seed built the model on all ranks; dropout differs by rank
        self.meter.restart()
        return [next((j for t, j in zip(trained, joined, strict=True) if t is each), each) for each in objects]

    # -- data ------------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """See :meth:`Context.epochs`."""
        epoch = self._begin_loop(Goal(epochs=n))
        while not self._trained_enough(epoch):
            self._begin_epoch(epoch)
            yield epoch
            epoch += 1
            self._end_epoch(epoch)

    def steps(self, goal: Goal, deliver: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """See :meth:`Context.steps`. ``deliver`` makes the iterator of a pass."""
        epoch = self._begin_loop(goal)
        while not self._trained_enough(epoch):
            self._begin_epoch(epoch)
            resumed = len(self.state.progress.trained)
            yield from deliver()
            if not self._pass_ended:
                return
            if not self._pass_rows and not resumed:  # another pass would not train any either
                raise RunError(
                    f"epoch {epoch + 1} trained no sample, and ctx.steps goes on until its goal: the loop skipped each batch."
                )
            epoch += 1
            self._end_epoch(epoch)

    def _begin_loop(self, goal: Goal) -> int:
        """Begin a loop with this goal. Return its first epoch. If a loop before has left an epoch in its middle, that is the next one: an
        epoch delivers every sample once."""
        self._goal = goal
        self._over = "" if self._over == "time" else self._over  # the time of the loop before
        self._tell_progress()
        epoch = self.state.progress.epoch
        if self._in_epoch and self._visited_epoch == epoch and not self._trained_enough(epoch):
            epoch += 1
            self._end_epoch(epoch)
        return epoch

    def stop(self) -> None:
        """See :meth:`Context.stop`."""
        self._over = "stop"

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._in_epoch = True
        self._begun = Counter(self.state.progress.passes)
        self.reporter.epoch = epoch
        self.meter.restart()

    def _end_epoch(self, following: int) -> None:
        """Agree on what follows, and commit if that is due."""
        self._leave_pass()
        self.stepper.abandon()
        self._check_company()
        self._in_epoch = False
        over = self._over_here()
        if self.talk is not None:
            told = self.talk.gather_objects((over, self._passed))
            over = max((each for each, _ in told), key=OVERS.index)
            self._compare_passes([passed for _, passed in told])
        self._passed = Counter()
        self._hear_over(over)
        self.state.next_epoch(following)
        ended = self._trained_enough(following)
        if following % self.setup.checkpoints.every_epochs == 0 or ended:
            self._commit("epoch")
        if not ended:
            self._await_schedule(following)
            self._obey(self._agreed_end())

    def _compare_passes(self, told: Sequence[Counter[str]]) -> None:
        """Report once that the ranks, in their order, took different passes over other data sets: each sees its share alone."""
        if self.rank or self._told_passes:
            return
        mine = told[0]
        differ = (
            (rank, name) for rank, theirs in enumerate(told) for name in theirs | mine if theirs[name] != mine[name]
        )
        if found := next(differ, None):
            rank, name = found
            self._told_passes = True
            passes = [mine[name], told[rank][name]]
            self.reporter.event(PassesDiffer(dataset=name, epoch=self.epoch, other=rank, passes=passes))

    def _over_here(self) -> Over:
        """Why training is over, as this rank sees it. Rank 0's clock decides on time."""
        seconds = self._goal.seconds
        late = self.rank == 0 and seconds is not None and self.state.seconds >= seconds
        return self._over or ("time" if late else "")

    def _hear_over(self, over: Over) -> None:
        """Follow the ranks' agreement that training is over."""
        self._over = self._over or over
        if over == "stop" and not self.state.progress.stopped:
            self.state.stop()
            if self.rank == 0:
                self.reporter.event(StoppedEarly(epoch=self.epoch, step=self.state.progress.step))

    @property
    def _samples(self) -> int | None:
        """The training samples of an epoch; None if only its pass tells."""
        return None if TRAIN in self.setup.yielded else self.setup.sized[TRAIN]

    def _trained_enough(self, epoch: int) -> bool:
        """Whether training is over before this epoch."""
        return self._over == "time" or self._goal.reached(
            self.state.progress,
            epoch,
            samples=self._samples,
            initial=self.setup.batch_size.initial,
            adaptive=self.scaling is not None,
        )

    def _await_schedule(self, epoch: int) -> bool:
        """If the schedule changes the number of workers here, let rank 0 wait for the driver's orders, or for its answer that there is
        no room. Return whether the schedule changes it, the same on all ranks."""
        adaptation, goal = self.setup.adaptation, self._useful_goal()
        if not adaptation.schedule:
            return False
        progress = min(self.state.progress.useful / goal, 1.0) if goal else 0.0
        before, self._scheduled = self._scheduled, adaptation.scheduled(epoch, progress)
        if self._scheduled is None or self._scheduled == before:
            return False
        if self.rank == 0:
            begun = adaptation.entries_begun(epoch, progress)
            self.reporter.epoch = epoch
            until = time.monotonic() + RESIZE_DEADLINE_S
            with self.watchdog.waiting():
                while time.monotonic() < until:
                    self.reporter.flush()
                    orders = self.reporter.orders
                    if self.reporter.end or orders.entries_followed >= begun:
                        break
                    self.place.sleep(WAIT_S)
        return True

    def _obey(self, end: End) -> None:
        """Commit and end if the driver ordered it: for good, or until a group with another number of workers starts."""
        if not end:
            return
        if self.state.uncommitted or not self.state.settled:
            self._commit(end)
        if end == "stop":
            raise StopRun
        if self.rank == 0:
            self.reporter.event(ReadyToResize(step=self.state.progress.step))
            self.reporter.flush()
            self.setup.hub.ready_to_end(self.attempt)
        until = time.monotonic() + RESIZE_DEADLINE_S
        with self.watchdog.waiting():
            while True:  # until Ray Train ends this process, or the driver stops the run
                orders = self.reporter.orders
                if orders.stop:
                    raise StopRun
                if not orders.workers:  # nothing fits at present: the run waits for nodes, however long that takes
                    until = time.monotonic() + RESIZE_DEADLINE_S
                elif time.monotonic() >= until:
                    break
                self.place.sleep(WAIT_S)
        raise RunError(
            f"Ray Train did not start the new number of workers within {RESIZE_DEADLINE_S:.0f} s. The same command "
            "resumes from the checkpoint."
        )

    def batches(self, name: str, *, drop_last: bool = False, least: int = 1) -> Iterator[Any]:
        """See :meth:`Context.batches`. ``least``: the fewest rows of a batch, where that can be had."""
        if name not in self.setup.sized:
            raise RunError(f"there is no data set {name!r}; the Trainer's datasets are {', '.join(self.setup.sized)}.")
        self._check_company()
        training = name == TRAIN
        if training and self._visited_epoch == self.epoch:
            raise RunError(
                f"ctx.batches({TRAIN!r}) was called twice in epoch {self.epoch + 1}, and an epoch delivers every sample once. "
                "Call it once in each round of: for epoch in ctx.epochs(n)."
            )
        if training:
            self._visited_epoch = self.epoch
        done = self.state.progress.trained if training else Ranges()
        visit = self.epoch if training else self._visits[name]
        self._visits[name] += 1
        within = self.epoch if self._in_epoch else OUTSIDE
        key = PassKey(attempt=self.attempt, name=name, number=visit)
        request = PassRequest(
            world_size=self.world_size,
            first_rows=self._split.local_batch_size * self.world_size,
            epoch=self.epoch if training else self._pass_number(name, within),
            done=done.pairs,
            followed=training and self._followed(),
            batch=self._split.global_batch_size if training and self.setup.deterministic else None,
        )
        began = time.monotonic()
        if training:
            self.meter.restart()  # the user's work between two passes belongs to no step
        total = self.setup.hub.open(key, request, self.rank, self.place.node)
        rows = self.rows
        if not training:
            self._share_buffers()
        batches = Batches(
            self.place.feed(self.setup.hub, self.direct),
            key,
            peers=self.place.peers[name],
            split=self._split,
            delivery=self.delivery(name),
            cutting=Cutting(
                padded=training,
                # A batch's samples then depend on the number of ranks, and a deterministic run's must not.
                least=1 if self.setup.deterministic else least,
                drop_last=drop_last,
                budget=budget_of(self.setup.collate_fn.get(name)),
                ordered=self.setup.deterministic or self.setup.ordered[name],
            ),
            agreement=self._agreement() if training else NoAgreement(),
            template=self._template,
            total=total,
        )
        try:
            if training:
                self._running = batches
                yield from self._training_batches(batches, began)
            else:
                self._passed[name] += 1
                with self.meter.outside():  # also within a step
                    yield from self._plain_batches(batches, name)
        finally:
            if not training:
                batches.close()
                self.rows = rows  # a validation pass may lie within a training pass
                if self._in_epoch and self.epoch == within:
                    self.state.ended_pass(name)
            elif self._running is batches:
                self._leave_pass()

    def _pass_number(self, name: str, within: int) -> int:
        """What stands for the epoch in the next pass over another data set. A resumed run counts from where its checkpoint is. Passes
        outside of epochs count from the start of each run: a script repeats those before its loop."""
        begun = self._outside if within == OUTSIDE else self._begun
        begun[name] += 1
        return pass_number(name, within, begun[name] - 1) if name in self.setup.varied else 0

    def _leave_pass(self) -> None:
        """End the training pass, if one is running. A loop that breaks off may keep the iterator until a later epoch."""
        batches, self._running = self._running, None
        if batches is None:
            return
        if self.stepper.has_stepped:  # the loop broke off after its own step
            self._settle()
        batches.close()
        # Raised later: Python ignores an exception of an iterator that the loop drops.
        self._went_on = batches.went_on
        self.meter.restart()

    def delivery(self, name: str) -> Delivery:
        """What makes the batches of a data set on the device."""
        return Delivery(self.device, collate_fn=self.setup.collate_fn.get(name), on_device=self.setup.on_device[name])

    def expected_batches(self, name: str, *, drop_last: bool = False) -> int | None:
        """The number of this worker's batches in a pass over a data set, at the present split; None if only the pass tells: the
        number of samples is unknown, a generator makes them, or tokens limit the batches.

        After a restart within an epoch, that epoch's pass has the rest of the batches. Before :meth:`epochs` or :meth:`steps` has begun an
        epoch, the number is that of a whole one: schedulers of learning rates multiply it by the number of epochs.
        """
        samples = self.setup.sized[name]
        limited = budget_of(self.setup.collate_fn.get(name)) is not None
        if samples is None or limited or name in self.setup.yielded:
            return None
        at_once = self._split.local_batch_size * self.world_size
        part = math.floor if drop_last else math.ceil
        if name != TRAIN:
            return part(samples / at_once)
        done = len(self.state.progress.trained) if self._in_epoch else 0
        whole, rest = divmod(samples - done, self._split.global_batch_size)
        return whole * (self._split.accum_steps + 1) + part(rest / at_once)

    def _training_batches(self, batches: Batches, began: float) -> Iterator[Any]:
        self._ahead: list[tuple[LocalBatch | None, float, float]] = []
        self._peek_at = batches
        following = self._next_batch(batches, since=began)
        self._start_batch(following, first=True)
        if following[0] is not None:
            self.reporter.event(FirstBatch(epoch=self.epoch, seconds=round(time.monotonic() - began, 3)))
        due, over, done = False, False, len(self.state.progress.trained)
        self._pass_ended = False
        self._pass_rows = 0
        delivered = following[0] is not None
        while (batch := following[0]) is not None:
            due, over = due or batch.heard.due, over or bool(batch.heard.over)
            self._obey(batch.heard.end)
            if batch.left and not over:
                raise RunError(self._left_alone(batch.left, [self.rank]))
            self._hear_over(batch.heard.over)
            if self.stepper.between_global_batches:  # the same ones on all ranks
                if due and self.state.uncommitted:
                    self._commit("interval")
                    due = False
                if self._trained_enough(self.epoch) and (over or self.scaling is not None or not self._goal.by_epochs):
                    self._tell_untrained(done)
                    break
                if self._await_schedule(self.epoch):
                    self._obey(self._agreed_end())
                self._begin_global_batch(batch.split)
            self.stepper.take(batch)
            self.rows = batch.rows
            yield shown_batch(batch.content)
            if self._running is not batches:  # the epoch has ended
                return
            self._settle()
            following = self._ahead.pop() if self._ahead else self._next_batch(batches)
            self._start_batch(following)
        else:
            self._note_skipped(batches.leftover, TRAIN)
            if not done and not delivered:
                self._refuse_empty_pass(batches.leftover)
            self._heard(batches.last_heard)
            self._credit_untrainable(done)
            self._pass_ended = True

    def _refuse_empty_pass(self, leftover: Sequence[Skipped]) -> NoReturn:
        """Raise RunError for a pass without a batch, of which this rank skipped these samples. Such a run must not look as if it had
        finished: storage may refuse every read."""
        if not leftover:
            raise RunError(
                f"epoch {self.epoch + 1} delivered no batch: drop_last, filters or transforms left no training samples, or another worker "
                "skipped them (skipped.jsonl in the run directory)."
            )
        raise RunError(
            f"epoch {self.epoch + 1} delivered no batch, since training samples were skipped, such as sample {leftover[0].sample_id} "
            f"({leftover[0].reason}). skipped.jsonl in the run directory names each. Correct the cause; with on_error='raise', a run "
            "ends at the first such sample."
        )

    def _check_company(self) -> None:
        """Raise RunError if this rank has left a pass in which others went on: they wait for it, and it would wait for them."""
        if self._went_on:
            raise RunError(self._left_alone([self.rank], self._went_on))

    def _left_alone(self, left: Sequence[int], went_on: Sequence[int]) -> str:
        """The error of ranks that train on after others have left the pass."""
        return (
            f"{_workers(left)} left the loop over ctx.batches('train') in epoch {self.epoch + 1}, at step {self.state.progress.step}, "
            f"and {_workers(went_on)} went on. All workers must leave it at the same batch. To end training early, call ctx.stop(), "
            "which ends all of them."
        )

    def _credit_untrainable(self, done: int) -> None:
        """After a pass, count skipped samples as trained. Otherwise another pass would begin for them."""
        samples = self._samples
        if samples is not None:
            self.state.credit(samples - done - self._pass_rows)

    def _tell_untrained(self, done: int) -> None:
        """Report the samples that the pass leaves untrained, if the epochs end in its middle."""
        samples = self._samples
        if samples is not None and self.rank == 0:
            self.reporter.event(PassNotFinished(epoch=self.epoch, untrained=samples - done - self._pass_rows))

    def _agreement(self) -> TrainingAgreement:
        mail = self.scaling.mail if self.scaling is not None else Mailbox(0)
        return TrainingAgreement(
            self.rank,
            self.world_size,
            end=lambda: self.reporter.end,
            split=lambda: self.reporter.split,
            due=self.committer.due,
            over=self._over_here,
            mail=mail,
        )

    def _followed(self) -> bool:
        """Return whether another pass will follow this one, so that its preprocessing may begin early."""
        size = self._split.global_batch_size
        return self._goal.followed(
            self.state.progress,
            self.epoch,
            samples=self._samples,
            batch=size,
            initial=self.setup.batch_size.initial,
            worth=None if self.scaling is None else self.scaling.useful(size) / size,
        )

    def _begin_global_batch(self, split: BatchSplit) -> None:
        if split != self._split:
            self._split = split
            self._changes += 1
            if self.rank == 0:
                self.reporter.event(
                    Rebatched(
                        epoch=self.epoch,
                        step=self.state.progress.step,
                        local_batch_size=split.local_batch_size,
                        accum_steps=split.accum_steps,
                        global_batch_size=split.global_batch_size,
                    )
                )
        self.stepper.begin_global_batch(split)

    def _heard(self, heard: Heard) -> None:
        if self.scaling is not None:
            self.scaling.heard(heard.measured)

    def _plain_batches(self, batches: Batches, name: str) -> Iterator[Any]:
        while (batch := self._get(batches)) is not None:
            self._note_skipped(batch.skipped, name)
            if batch.rows:
                self.rows = batch.rows
                yield shown_batch(batch.content)
        self._note_skipped(batches.leftover, name)

    def _next_batch(self, batches: Batches, since: float | None = None) -> tuple[LocalBatch | None, float, float]:
        """Return (the next batch, or None at the end; seconds waited for this rank's samples; seconds waited for other ranks'), counted
        from now, or from ``since``."""
        asked = time.monotonic() if since is None else since
        batch = self._get(batches)
        waited = time.monotonic() - asked
        own = waited if batch is None else min(max(batch.own_ready_s - asked, 0.0), waited)
        return batch, own, waited - own

    def _get(self, batches: Batches) -> LocalBatch | None:
        with self.watchdog.waiting():
            return batches.get()

    def _start_batch(self, following: tuple[LocalBatch | None, float, float], *, first: bool = False) -> None:
        batch, own, peer = following
        if batch is not None:
            self.meter.waited(own, peer, batch.rows, first=first)
            self._note_skipped(batch.skipped, TRAIN)
            self._heard(batch.heard)

    def _has_another(self) -> bool:
        """Return whether the pass has another micro-batch. Called only while gradients accumulate."""
        if not self._ahead:
            with self.meter.paused():
                self._ahead.append(self._next_batch(self._peek_at))
        batch = self._ahead[0][0]
        return batch is not None and not batch.heard.end

    def _note_skipped(self, skipped: Sequence[Skipped], dataset: str) -> None:
        for each in skipped:
            self.reporter.event(
                SampleSkipped(dataset=dataset, sample_id=each.sample_id, reason=each.reason, epoch=self.epoch)
            )

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """See :meth:`Context.backward`."""
        self.stepper.backward(loss, self._has_another, retain_graph=retain_graph)

    def skip(self) -> None:
        """See :meth:`Context.skip`."""
        self.stepper.skip(self._has_another)

    def step(self, optimizers: Sequence[torch.optim.Optimizer], clip_norm: float | None) -> bool:
        """See :meth:`Context.step`."""
        known = [id(each) for each in self.state.optimizers]
        if any(id(each) not in known for each in optimizers):
            raise RunError(
                "ctx.step(optimizer) takes optimizers that ctx.prepare got. Pass this one to ctx.prepare, too."
            )
        rows = self.stepper.step(optimizers, clip_norm=clip_norm, passes=self._passes())
        if rows and not optimizers:
            self._stepped(rows)
        return rows > 0

    def _settle(self) -> None:
        """End the batch that the loop leaves, if ctx.step() has not."""
        rows = self.stepper.settle(self._passes())
        if rows:
            self._stepped(rows)

    def _passes(self) -> float:
        """The number of passes trained so far."""
        samples = self._samples
        return self.state.progress.samples / samples if samples else float(self.epoch)

    def _stepped(self, rows: int) -> None:
        """Note the end of a global batch."""
        self._pass_rows += rows
        self._tell_progress()
        if self._first_step and self.rank == 0:
            self.reporter.event(FirstStep(step=self.state.progress.step, workers=self.world_size))
        self._first_step = False
        self.reporter.totals = self.meter.totals()

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, values: list[float], what: str) -> list[float]:
        """Element-wise sums over all workers, for the user's call ``what``."""
        self._check_company()
        with self.watchdog.waiting(what):
            return values if self.talk is None else self.talk.sum(values, what)

    def gather(self, value: Any) -> list[Any]:
        """See :meth:`Context.gather`."""
        self._check_company()
        what = "ctx.gather() or ctx.sum() of a tensor"
        with self.watchdog.waiting(what):
            return [value] if self.talk is None else self.talk.gather_objects(value, what)

    def accumulated(self) -> dict[str, float]:
        """See :meth:`Context.accumulated`."""
        what = "ctx.accumulated()"
        with self.watchdog.waiting(what):
            return self.state.accumulated(what)

    def report(self, metrics: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """See :meth:`Context.report`."""
        names = sorted(metrics)
        with self.meter.outside():
            sums = self.sum([metrics[name] for name in names], f"ctx.report({', '.join(names)})")
            means = [value / self.world_size for value in sums]
        self._reported.update(zip(names, means, strict=True))
        within = self.stepper.batch is not None or not self.stepper.between_global_batches
        self._reported_at.update(dict.fromkeys(names, self.state.progress.step + within))
        self.reporter.metrics(self._reported)
        if self.rank == 0:
            self.reporter.event(
                MetricsReported(
                    epoch=self.epoch,
                    step=self.state.progress.step,
                    metrics=dict(zip(names, means, strict=True)),
                    texts=dict(texts) if texts else None,
                )
            )

    def _agreed_end(self) -> End:
        """Return how the group ends, as rank 0 sees it: orders reach the ranks at different times."""
        mine = self.reporter.end
        agreed: End = mine if self.talk is None else self.talk.broadcast(mine, 0)
        return agreed

    def _commit(self, reason: str) -> None:
        now = self.state.progress.step
        metrics = {name: value for name, value in self._reported.items() if self._reported_at[name] >= now}
        with self.meter.outside():
            self.committer.commit(reason, metrics, self._adaptation_state())

    def _adaptation_state(self) -> dict[str, Any]:
        if self.scaling is None:
            return {}
        return {
            "noise": self.scaling.to_state(),
            "workers": self.world_size,
            "batch": [self._split.local_batch_size, self._split.accum_steps],
            "learned": self.reporter.orders.learned or self.state.adapting.get("learned"),
        }

    def _first_split(self, start: GroupStart) -> BatchSplit:
        """The first split of global batches: as ordered, else the checkpoint's, else the user's."""
        stored, sizes = self.state.adapting, self.setup.batch_size
        before = start.orders.split
        if before is None and stored:
            local, accum = stored["batch"]
            before = BatchSplit(workers=stored["workers"], local_batch_size=local, accum_steps=accum)
        split = sizes.split(self.world_size) if before is None else sizes.carried_over(before, self.world_size)
        return split.with_local_at_most(start.most_local)

    def _resume(self) -> None:
        if not self.state.resumed:
            return
        progress = self.state.progress
        if self.scaling is not None and self.state.adapting:
            self.scaling.restore(self.state.adapting["noise"])
        self.epoch = self.reporter.epoch = progress.epoch
        self._tell_progress()
        if self.rank == 0:
            self.reporter.event(
                WorkersResumed(
                    attempt=self.attempt,
                    epoch=progress.epoch,
                    step=progress.step,
                    trained=len(progress.trained),
                    epoch_starts_again=self.state.changed,
                    damaged=self.state.damaged,
                )
            )

    def _tell_progress(self) -> None:
        progress = self.state.progress
        self.reporter.step, self.reporter.samples = progress.step, progress.samples
        noise = None if self.scaling is None else self.scaling.noise.whole
        self.reporter.group = GroupStatus(
            workers=self.world_size,
            split=self._split,
            changes=self._changes,
            useful=progress.useful,
            noise=None if noise is None else (noise.sqr, noise.var, noise.sqr_error),
            goal=self._useful_goal(),
            learned=self.state.adapting.get("learned"),
            most_local=self.stepper.most_local,
        )

    def _useful_goal(self) -> float | None:
        """The progress at which training ends, in samples; None if unknown."""
        return self._goal.useful(samples=self._samples, initial=self.setup.batch_size.initial)

    def _share_weights(self, models: Sequence[torch.nn.Module], shared: Sequence[torch.nn.Module]) -> None:
        """Give all ranks rank 0's weights and buffers of models: ranks may have drawn or read others, and an exchange of gradients keeps
        what differs. DistributedDataParallel has shared the parameters of the ``shared`` ones, and not their buffers."""
        if self.world_size == 1:
            return
        tensors = [p for o in self.state.optimizers for group in o.param_groups for p in group["params"]]
        tensors += [each for model in models for each in (*model.parameters(), *model.buffers())]
        known = {id(p) for model in shared for p in model.parameters()}
        # Each once: optimizers and models hold the same ones. The parts of a sharded one differ by rank.
        self.place.share({id(t): t for t in tensors if id(t) not in known and not is_part(t)}.values())

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers (running statistics) when validation starts."""
        if self.world_size > 1:
            for model in self.state.models:
                self.place.share(model.buffers())

    def out_of_memory(self, error: BaseException) -> None:
        """The user's function ran out of device memory. Raises DeviceMemoryError if smaller batches may fit:
        the workers then start again with those."""
        batch = self.stepper.batch
        if batch is None:
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        # A single worker loses nothing: the model is as the last step left it. With others, their state is unknown.
        if self.world_size == 1 and self.state.uncommitted and not self.stepper.stepping:
            self._commit("out_of_memory")
        if self.setup.hub.out_of_memory(self.rank, batch.split):
            self.reporter.flush()
            raise DeviceMemoryError(
                f"local batches of {batch.split.local_batch_size} samples do not fit: {error}"
            ) from error

    def commit_rest(self) -> None:
        """Commit what was trained since the last checkpoint."""
        self._leave_pass()
        self._check_company()
        if self.state.uncommitted:
            self._commit("end")

    def finish(self) -> None:
        """Push the last measurements."""
        self.reporter.totals = self.meter.totals()
        self.reporter.close()
        self.direct.close()


def _workers(ranks: Sequence[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model without the wrapper of torch.compile."""
    plain: torch.nn.Module = getattr(model, "_orig_mod", model)
    return plain


def budget_of(collate_fn: Any) -> Budget | None:
    """The limit of tokens that a collate function sets for a batch, such as :class:`offload.collate.pad` with ``max_tokens``."""
    most = getattr(collate_fn, "max_tokens", None)
    return None if most is None else Budget(tokens=collate_fn.tokens, most=most)


def first_pass(split: BatchSplit, *, deterministic: bool) -> PassRequest:
    """The first pass of every new run. The driver starts it while the workers start."""
    first_rows = split.local_batch_size * split.workers
    batch = split.global_batch_size if deterministic else None
    return PassRequest(world_size=split.workers, first_rows=first_rows, epoch=0, batch=batch)
