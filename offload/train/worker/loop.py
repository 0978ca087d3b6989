"""The loop of one worker: batches, steps, and everything between two steps.

It opens passes, agrees with the other ranks on ends and commits, counts progress, follows the driver's orders and reports to the hub.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import RunError
from offload.measure.steps import Clock, CudaClock, StepMeter
from offload.model.batch_split import BatchSplit
from offload.pipeline.passes import PassKey, PassRequest
from offload.pipeline.ranges import Ranges
from offload.pipeline.wire import Columns
from offload.train.hub.client import HubClient
from offload.train.messages import TRAIN, End, GroupStart, GroupStatus
from offload.train.worker.agreement import Heard, Mailbox, NoAgreement, TrainingAgreement
from offload.train.worker.batch import Batch
from offload.train.worker.batch_scaling import BatchScaling
from offload.train.worker.batches import Batches, LocalBatch, Peers, Skipped
from offload.train.worker.checkpointer import Checkpointer
from offload.train.worker.committing import Committer
from offload.train.worker.device_memory import DeviceMemory, DeviceMemoryError
from offload.train.worker.feed_client import FeedClient, HubFeed
from offload.train.worker.peers import Talk
from offload.train.worker.reporter import Reporter
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.state import TrainingState
from offload.train.worker.stepping import Join, Stepper
from offload.train.worker.watchdog import Watchdog

ROUNDING = 1e-9  # of an epoch
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
        join: joins a model with those of the other workers.
        share: copies rank 0's buffers to all ranks.
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
    share: Callable[[torch.nn.Module], None]
    feed: Callable[[HubClient], FeedClient] = HubFeed
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
            resumable=setup.resumable[TRAIN],
        )
        self._template: dict[str, Columns] = {}
        self._visits = dict.fromkeys(names, 0)
        self._visited_epoch = -1
        self._epochs_total = 1
        self._scheduled: int | None = self.world_size
        self._reported: dict[str, float] = {}
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
        self._first_step = True
        self._resume()
        self.reporter.flush()  # the driver should know this worker's node if it dies soon

    # -- model -----------------------------------------------------------------------------------------------------

    def prepare(self, model: torch.nn.Module, others: Sequence[Any]) -> torch.nn.Module:
        """See :meth:`Context.prepare`. Returns the joined model."""
        if self.state.model is not None:
            raise RunError("ctx.prepare was called twice. Prepare one model, with all its optimizers, once.")
        plain: torch.nn.Module = getattr(model, "_orig_mod", model)
        model = model.to(self.device)
        self.state.adopt(plain, others)
        if self.scaling is not None:
            self.scaling.adopt(self.state.optimizers)
        model = self.stepper.join(model)
        if not self.state.resumed:
            torch.manual_seed(
                self.setup.seed + self.rank
            )  # the same seed built the model on all ranks; dropout differs by rank
        self.meter.restart()
        return model

    # -- data ------------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """See :meth:`Context.epochs`."""
        self._epochs_total = n
        self._tell_progress()
        epoch = self.state.progress.epoch
        while not self._trained_enough(epoch):
            self.epoch = epoch
            self.reporter.epoch = epoch
            self.meter.restart()
            yield epoch
            epoch += 1
            self.state.next_epoch(epoch)
            ended = self._trained_enough(epoch)
            if epoch % self.setup.checkpoints.every_epochs == 0 or ended:
                self._commit("epoch")
            if not ended:
                self._await_schedule(epoch)
                self._obey(self._agreed_end())

    def _trained_enough(self, epoch: int) -> bool:
        """Return whether the requested epochs are over. With adaptive batches, an epoch is over once its samples are worth an epoch of
        initial batches: in larger batches each sample is worth less."""
        samples = self.setup.sized[TRAIN]
        if self.scaling is None or samples is None:
            return epoch >= self._epochs_total
        return self.state.progress.useful >= (self._epochs_total - ROUNDING) * samples

    def _await_schedule(self, epoch: int) -> bool:
        """If the schedule changes the number of workers here, let rank 0 wait for the driver's orders, or for its answer that there is
        no room. Return whether the schedule changes it, the same on all ranks."""
        adaptation, goal = self.setup.adaptation, self._goal()
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
            self.reporter.event("ready_to_resize", step=self.state.progress.step)
            self.reporter.flush()
            self.setup.hub.ready_to_end(self.attempt)
        until = time.monotonic() + RESIZE_DEADLINE_S
        with self.watchdog.waiting():
            while time.monotonic() < until:  # in this time Ray Train ends this process, or the driver stops the run
                if self.reporter.orders.stop:
                    raise StopRun
                self.place.sleep(WAIT_S)
        raise RunError(
            f"Ray Train did not start the new number of workers within {RESIZE_DEADLINE_S:.0f} s. The same command "
            "resumes from the checkpoint."
        )

    def batches(self, name: str) -> Iterator[Batch]:
        """See :meth:`Context.batches`."""
        if name not in self.setup.sized:
            raise RunError(f"there is no data set {name!r}; the Trainer's datasets are {', '.join(self.setup.sized)}.")
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
        key = PassKey(attempt=self.attempt, name=name, number=visit)
        request = PassRequest(
            world_size=self.world_size,
            first_rows=self._split.local_batch_size * self.world_size,
            epoch=self.epoch if training else 0,
            done=done.pairs,
            followed=training and self._followed(),
            batch=self._split.global_batch_size if training and self.setup.deterministic else None,
        )
        began = time.monotonic()
        if training:
            self.meter.restart()  # the user's work between two passes belongs to no step
        self.setup.hub.open(key, request, self.rank)
        if not training:
            self._share_buffers()
        batches = Batches(
            self.place.feed(self.setup.hub),
            key,
            peers=self.place.peers[name],
            split=self._split,
            device=self.device,
            on_device=self.setup.on_device[name],
            padded=training,
            agreement=self._agreement() if training else NoAgreement(),
            template=self._template,
            in_order=self.setup.deterministic,
        )
        try:
            yield from self._training_batches(batches, began) if training else self._plain_batches(batches, name)
        finally:
            batches.close()
            self.meter.restart()

    def expected_batches(self, name: str) -> int | None:
        """The number of this worker's batches in the next pass over a data set, at the present split; None if the number of samples is
        unknown."""
        samples = self.setup.sized[name]
        if samples is None:
            return None
        at_once = self._split.local_batch_size * self.world_size
        if name != TRAIN:
            return math.ceil(samples / at_once)
        whole, rest = divmod(samples - len(self.state.progress.trained), self._split.global_batch_size)
        return whole * (self._split.accum_steps + 1) + math.ceil(rest / at_once)

    def _training_batches(self, batches: Batches, began: float) -> Iterator[Batch]:
        self._ahead: list[tuple[LocalBatch | None, float, float]] = []
        self._peek_at = batches
        following = self._next_batch(batches, since=began)
        self._start_batch(following, first=True)
        if following[0] is not None:
            self.reporter.event("first_batch", epoch=self.epoch, seconds=round(time.monotonic() - began, 3))
        due, done = False, len(self.state.progress.trained)
        self._pass_rows = 0
        while (batch := following[0]) is not None:
            due = due or batch.heard.due
            self._obey(batch.heard.end)
            if self.stepper.between_global_batches:  # the same ones on all ranks
                if due and self.state.uncommitted:
                    self._commit("interval")
                    due = False
                if self.scaling is not None and self._trained_enough(self.epoch):
                    self._tell_untrained(done)
                    break
                if self._await_schedule(self.epoch):
                    self._obey(self._agreed_end())
                self._begin_global_batch(batch.split)
            self.stepper.take(batch)
            self.rows = batch.rows
            yield Batch(batch.tensors)
            if self.stepper.batch is not None:
                raise RunError(
                    "the loop took the next batch without ctx.step(). Call ctx.backward(loss) and ctx.step() once for each batch "
                    "of ctx.batches('train')."
                )
            following = self._ahead.pop() if self._ahead else self._next_batch(batches)
            self._start_batch(following)
        else:
            self._note_skipped(batches.leftover, TRAIN)
            self._heard(batches.last_heard)
            self._credit_untrainable(done)

    def _credit_untrainable(self, done: int) -> None:
        """After a pass, count skipped samples as trained. Otherwise another pass would begin for them."""
        samples = self.setup.sized[TRAIN]
        if samples is not None:
            self.state.credit(samples - done - self._pass_rows)

    def _tell_untrained(self, done: int) -> None:
        """Report the samples that the pass leaves untrained, if the epochs end in its middle."""
        samples = self.setup.sized[TRAIN]
        if samples is not None and self.rank == 0:
            self.reporter.event("pass_not_finished", epoch=self.epoch, untrained=samples - done - self._pass_rows)

    def _agreement(self) -> TrainingAgreement:
        mail = self.scaling.mail if self.scaling is not None else Mailbox(0)
        return TrainingAgreement(
            self.rank,
            self.world_size,
            end=lambda: self.reporter.end,
            split=lambda: self.reporter.split,
            due=self.committer.due,
            mail=mail,
        )

    def _followed(self) -> bool:
        """Return whether another pass will follow this one, so that its preprocessing may begin early."""
        samples = self.setup.sized[TRAIN]
        if self.scaling is None or samples is None:
            return self.epoch + 1 < self._epochs_total
        progress, size = self.state.progress, self._split.global_batch_size
        left = samples - len(progress.trained)
        after = progress.useful + left * self.scaling.useful(size) / size
        return after < (self._epochs_total - ROUNDING) * samples

    def _begin_global_batch(self, split: BatchSplit) -> None:
        if split != self._split:
            self._split = split
            self._changes += 1
            if self.rank == 0:
                self.reporter.event(
                    "rebatched",
                    epoch=self.epoch,
                    step=self.state.progress.step,
                    local_batch_size=split.local_batch_size,
                    accum_steps=split.accum_steps,
                    global_batch_size=split.global_batch_size,
                )
        self.stepper.begin_global_batch(split)

    def _heard(self, heard: Heard) -> None:
        if self.scaling is not None:
            self.scaling.heard(heard.measured)

    def _plain_batches(self, batches: Batches, name: str) -> Iterator[Batch]:
        while (batch := self._get(batches)) is not None:
            self._note_skipped(batch.skipped, name)
            if batch.rows:
                self.rows = batch.rows
                yield Batch(batch.tensors)
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
                "skipped", dataset=dataset, sample_id=each.sample_id, reason=each.reason, epoch=self.epoch
            )

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """See :meth:`Context.backward`."""
        self.stepper.backward(loss, self._has_another)

    def step(self, clip_norm: float | None) -> bool:
        """See :meth:`Context.step`."""
        samples = self.setup.sized[TRAIN]
        passes = self.state.progress.samples / samples if samples else float(self.epoch)
        rows = self.stepper.step(clip_norm=clip_norm, passes=passes)
        if not rows:
            return False
        self._pass_rows += rows
        self._tell_progress()
        if self._first_step and self.rank == 0:
            self.reporter.event("first_step", step=self.state.progress.step, workers=self.world_size)
        self._first_step = False
        self.reporter.totals = self.meter.totals()
        return True

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over all workers."""
        with self.watchdog.waiting():
            return values if self.talk is None else self.talk.sum(values)

    def gather(self, value: Any) -> list[Any]:
        """See :meth:`Context.gather`."""
        with self.watchdog.waiting():
            return [value] if self.talk is None else self.talk.gather_objects(value)

    def accumulated(self) -> dict[str, float]:
        """See :meth:`Context.accumulated`."""
        with self.watchdog.waiting():
            return self.state.accumulated()

    def report(self, metrics: Mapping[str, float]) -> None:
        """See :meth:`Context.report`."""
        names = sorted(metrics)
        means = [value / self.world_size for value in self.sum([metrics[name] for name in names])]
        self._reported.update(zip(names, means, strict=True))
        self.reporter.metrics(self._reported)
        if self.rank == 0:
            self.reporter.event(
                "report",
                epoch=self.epoch,
                step=self.state.progress.step,
                metrics=dict(zip(names, means, strict=True)),
            )
        self.meter.restart()

    def _agreed_end(self) -> End:
        """Return how the group ends, as rank 0 sees it: orders reach the ranks at different times."""
        mine = self.reporter.end
        agreed: End = mine if self.talk is None else self.talk.broadcast(mine, 0)
        return agreed

    def _commit(self, reason: str) -> None:
        self.committer.commit(reason, self._reported, self._adaptation_state())
        self.meter.restart()

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
                "resumed",
                attempt=self.attempt,
                epoch=progress.epoch,
                step=progress.step,
                trained=len(progress.trained),
                epoch_starts_again=self.state.changed,
                damaged=self.state.damaged,
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
            noise=None if noise is None else (noise.sqr, noise.var),
            goal=self._goal(),
            learned=self.state.adapting.get("learned"),
            most_local=self.stepper.most_local,
        )

    def _goal(self) -> float | None:
        """Return the progress at which training ends, in samples; None if unknown."""
        samples = self.setup.sized[TRAIN]
        return None if samples is None else float(self._epochs_total * samples)

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers (running statistics) when validation starts."""
        if self.world_size > 1 and self.state.model is not None:
            self.place.share(self.state.model)

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
        if self.state.uncommitted:
            self._commit("end")

    def finish(self) -> None:
        """Push the last measurements."""
        self.reporter.totals = self.meter.totals()
        self.reporter.close()


def first_pass(split: BatchSplit, *, deterministic: bool) -> PassRequest:
    """The first pass of every new run. The driver starts it while the workers start."""
    first_rows = split.local_batch_size * split.workers
    batch = split.global_batch_size if deterministic else None
    return PassRequest(world_size=split.workers, first_rows=first_rows, epoch=0, batch=batch)
