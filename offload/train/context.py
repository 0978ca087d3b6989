"""The worker's side of training: what the user's function gets as ``ctx``.

A plain PyTorch loop stays a loop; the context brings batches that were preprocessed elsewhere, keeps gradients exact when
ranks hold unequal batches, measures where time goes, and commits what resuming needs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from offload.errors import RunError
from offload.measure.steps import Clock, CudaClock, StepMeter
from offload.model.checks import check_count, check_number, shown
from offload.pipeline.passes import PassKey, PassRequest
from offload.pipeline.ranges import Ranges
from offload.pipeline.spec import OnDevice
from offload.pipeline.wire import Columns
from offload.train.adapting import Adapting
from offload.train.batches import Batches, LocalBatch, NoPeers, Peers, Skipped
from offload.train.committing import Committer
from offload.train.config import Adaptation, BatchSize, BatchSplit, Checkpoints, Precision
from offload.train.device_memory import DeviceMemory, DeviceMemoryError
from offload.train.feed_client import ActorFeed, open_pass
from offload.train.monitor import Adapted, Forward, Orders, Reporter
from offload.train.peers import DistPeers
from offload.train.state import TrainingState
from offload.train.stepping import Stepper
from offload.train.storage import Marker
from offload.train.voice import End, Heard, Mailbox, Silent, TrainingVoice
from offload.train.watchdog import Watchdog

TRAIN = "train"
ROUNDING = 1e-9  # of an epoch
MOST_EPOCHS = 10**9  # more is a mistake
RESIZE_DEADLINE_S = 600.0
WAIT_S = 0.2


class StopRun(BaseException):
    """Unwinds the user's function after the last commit of a run that was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """Everything the driver tells a worker."""

    hub: Any
    split: BatchSplit
    batch_size: BatchSize
    adaptation: Adaptation
    on_device: dict[str, tuple[OnDevice, ...]]
    sized: dict[str, int | None]
    resumable: dict[str, bool]
    checkpoints: Checkpoints
    precision: Precision
    seed: int
    hang_s: float
    deterministic: bool
    config: dict[str, Any]
    marker: Marker | None = None


class Context:
    """One worker of a run.

    Attributes:
        rank, world_size: this worker, and how many there are.
        device: where the model and the batches are.
        config: the Trainer's ``train_loop_config``.
        epoch: the epoch under way, from 0.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.device: torch.device = ray.train.torch.get_device()
        self.world_size = ray.train.get_context().get_world_size()
        self.rank = ray.train.get_context().get_world_rank()
        self.config = setup.config
        self.epoch = 0
        self._setup = setup
        names = sorted(setup.sized)
        self._peers = {name: DistPeers() if self.world_size > 1 else NoPeers() for name in names}
        self._talk: DistPeers | None = DistPeers() if self.world_size > 1 else None
        first: Any = ray.get(setup.hub.begin_group.remote()) if self.rank == 0 else None
        self._attempt: int
        orders: Orders
        self._attempt, orders, failures_per_s = first if self._talk is None else self._talk.broadcast(first, 0)
        self._watchdog = Watchdog(setup.hang_s)
        self._reporter = Reporter(setup.hub, self.rank, self._watchdog)
        clock = CudaClock(torch) if self.device.type == "cuda" else Clock()
        self._meter = StepMeter(clock)
        self._state = TrainingState(
            self._talk,
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
        self._adapting = self._new_adapting()
        self._committer = Committer(
            setup.checkpoints,
            self._state,
            self._reporter,
            self._watchdog,
            rank=self.rank,
            failures_per_s=failures_per_s,
        )
        self._stepper = Stepper(
            self._state,
            self._meter,
            self._watchdog,
            rank=self.rank,
            workers=self.world_size,
            adapting=self._adapting,
            memory=DeviceMemory(self.device),
        )
        self._state.load()
        self._split = self._first_split(orders)
        self._changes = 0
        self._pass_rows = 0
        self._first_step = True
        self._resume()
        self._reporter.flush()  # where this worker runs should be known if it dies soon

    # -- model -----------------------------------------------------------------------------------------------------

    def prepare(self, model: torch.nn.Module, *others: Any) -> Any:
        """Put a model on this worker's device, join it with the other workers' (DistributedDataParallel where there are
        several), and restore it and the others from the run's checkpoint, if there is one.

        ``others`` are optimizers, and anything else with ``state_dict`` and ``load_state_dict`` (learning-rate
        schedulers, say). Returns the arguments in their order, the model wrapped; the model alone if given alone.
        """
        if self._state.model is not None:
            raise RunError("ctx.prepare was called twice. Prepare one model, with all its optimizers, once.")
        plain: torch.nn.Module = getattr(model, "_orig_mod", model)
        model = model.to(self.device)
        self._state.adopt(plain, others)
        if self._adapting is not None:
            self._adapting.adopt(self._state.optimizers)
        model = self._stepper.join(model, self.device)
        if not self._state.resumed:
            torch.manual_seed(self._setup.seed + self.rank)  # one seed built the model; dropout is each rank's own
        self._meter.restart()
        return (model, *others) if others else model

    def autocast(self) -> Any:
        """``with ctx.autocast(): ...`` computes in the Trainer's ``precision``; nothing changes for ``"fp32"``."""
        if self._setup.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self._setup.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    # -- data ------------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs still to train, of ``n`` in all. After a restart it goes on with the epoch that was
        under way. At the end of each a checkpoint is committed.

        Raises ConfigError where ``n`` is no whole number of at least 0.
        """
        return self._epochs(
            check_count("the number of epochs in ctx.epochs(n)", n, most=MOST_EPOCHS, sane="such as 10")
        )

    def _epochs(self, n: int) -> Iterator[int]:
        self._epochs_total = n
        self._tell_progress()
        epoch = self._state.progress.epoch
        while not self._trained_enough(epoch):
            self.epoch = epoch
            self._reporter.epoch = epoch
            self._meter.restart()
            yield epoch
            epoch += 1
            self._state.next_epoch(epoch)
            ended = self._trained_enough(epoch)
            if epoch % self._setup.checkpoints.every_epochs == 0 or ended:
                self._commit("epoch")
            if not ended:
                self._await_schedule(epoch)
                self._obey(self._agreed_end())

    def _trained_enough(self, epoch: int) -> bool:
        """Whether the epochs asked for are over. Where batches adapt, an epoch is over when the samples of larger batches,
        which teach less each, taught what an epoch of initial batches does."""
        samples = self._setup.sized[TRAIN]
        if self._adapting is None or samples is None:
            return epoch >= self._epochs_total
        return self._state.progress.useful >= (self._epochs_total - ROUNDING) * samples

    def _await_schedule(self, epoch: int) -> bool:
        """Where the schedule asks for other workers from here on, let rank 0 wait until the driver orders them, or says that there
        is no room. Returns whether it asks: the same on all ranks."""
        adaptation, goal = self._setup.adaptation, self._goal()
        if not adaptation.schedule:
            return False
        progress = min(self._state.progress.useful / goal, 1.0) if goal else 0.0
        before, self._scheduled = self._scheduled, adaptation.scheduled(epoch, progress)
        if self._scheduled is None or self._scheduled == before:
            return False
        if self.rank == 0:
            begun = adaptation.entries_begun(epoch, progress)
            self._reporter.epoch = epoch
            until = time.monotonic() + RESIZE_DEADLINE_S
            with self._watchdog.waiting():
                while time.monotonic() < until:
                    self._reporter.flush()
                    orders = self._reporter.orders
                    if orders.resize or orders.stop or orders.entries_followed >= begun:
                        break
                    time.sleep(WAIT_S)
        return True

    def _obey(self, end: End) -> None:
        """Commit and end, where the driver says so: for good, or until there is another number of workers."""
        if not end:
            return
        if self._state.uncommitted or not self._state.settled:
            self._commit(end)
        if end == "stop":
            raise StopRun
        if self.rank == 0:
            self._reporter.event("ready_to_resize", step=self._state.progress.step)
            self._reporter.flush()
            ray.get(self._setup.hub.ready_to_resize.remote())
        until = time.monotonic() + RESIZE_DEADLINE_S
        with self._watchdog.waiting():
            while time.monotonic() < until:  # this process is ended meanwhile, or all are told to stop
                if self._reporter.orders.stop:
                    raise StopRun
                time.sleep(WAIT_S)
        raise RunError(
            f"the workers were to be restarted in another number, and {RESIZE_DEADLINE_S:.0f} s later they were not. The same "
            "command resumes from the checkpoint."
        )

    def batches(self, name: str = TRAIN, *columns: str) -> Iterator[Any]:
        """This worker's batches of a data set: dicts of tensors on the device, with ``sample_id``, int64. With ``columns``
        tuples of those, as a DataLoader gives them: ``for images, labels in ctx.batches("train", "image", "label")``.

        Over all workers each sample comes once. Of ``"train"`` every worker gets as many batches as the others; where
        samples run out the last ones are smaller, and one that has none left gets a filler that :meth:`backward` gives
        no weight. Of other data sets (validation) each worker gets its own samples and nothing else.
        """
        if name not in self._setup.sized:
            raise RunError(f"there is no data set {name!r}; the Trainer's datasets are {', '.join(self._setup.sized)}.")
        training = name == TRAIN
        if training and self._visited_epoch == self.epoch:
            raise RunError(
                f"ctx.batches({TRAIN!r}) was asked for twice in epoch {self.epoch + 1}, and every sample comes once. Let the "
                "loop around it be: for epoch in ctx.epochs(n)."
            )
        if training:
            self._visited_epoch = self.epoch
        done = self._state.progress.trained if training else Ranges()
        visit = self.epoch if training else self._visits[name]
        self._visits[name] += 1
        key = PassKey(attempt=self._attempt, name=name, number=visit)
        request = PassRequest(
            world_size=self.world_size,
            first_rows=self._split.local_batch_size * self.world_size,
            epoch=self.epoch if training else 0,
            done=done.pairs,
            followed=training and self._followed(),
            batch=self._split.global_batch_size if training and self._setup.deterministic else None,
        )
        began = time.monotonic()
        if training:
            self._meter.restart()  # what the user does between two passes is no part of a step
        open_pass(self._setup.hub, key, request, self.rank)
        if not training:
            self._share_buffers()
        batches = Batches(
            ActorFeed(self._setup.hub),
            key,
            peers=self._peers[name],
            split=self._split,
            device=self.device,
            on_device=self._setup.on_device[name],
            padded=training,
            voice=self._voice() if training else Silent(),
            template=self._template,
            in_order=self._setup.deterministic,
        )
        try:
            for batch in self._training_batches(batches, began) if training else self._plain_batches(batches, name):
                yield tuple_of(batch, columns) if columns else batch
        finally:
            batches.close()
            self._meter.restart()

    def _training_batches(self, batches: Batches, began: float) -> Iterator[dict[str, Any]]:
        self._ahead: list[tuple[LocalBatch | None, float, float]] = []
        self._peek_at = batches
        following = self._next_batch(batches, since=began)
        self._start_batch(following, first=True)
        if following[0] is not None:
            self._reporter.event("first_batch", epoch=self.epoch, seconds=round(time.monotonic() - began, 3))
        due, done = False, len(self._state.progress.trained)
        self._pass_rows = 0
        while (batch := following[0]) is not None:
            due = due or batch.heard.due
            self._obey(batch.heard.end)
            if self._stepper.between_global_batches:  # the same ones on all ranks
                if due and self._state.uncommitted:
                    self._commit("interval")
                    due = False
                if self._adapting is not None and self._trained_enough(self.epoch):
                    self._tell_untrained(done)
                    break
                if self._await_schedule(self.epoch):
                    self._obey(self._agreed_end())
                self._begin_global_batch(batch.split)
            self._stepper.take(batch)
            yield dict(batch.tensors)
            if self._stepper.batch is not None:
                raise RunError(
                    "a batch went by without ctx.step(). Call ctx.backward(loss) and ctx.step() once for each batch of "
                    "ctx.batches('train')."
                )
            following = self._ahead.pop() if self._ahead else self._next_batch(batches)
            self._start_batch(following)
        else:
            self._note_skipped(batches.leftover, TRAIN)
            self._heard(batches.last_heard)
            self._credit_untrainable(done)

    def _credit_untrainable(self, done: int) -> None:
        """The pass is over. Samples that were skipped count as trained, or another pass would begin for their sake."""
        samples = self._setup.sized[TRAIN]
        if samples is not None:
            self._state.credit(samples - done - self._pass_rows)

    def _tell_untrained(self, done: int) -> None:
        """The epochs ended in the middle of a pass."""
        samples = self._setup.sized[TRAIN]
        if samples is not None and self.rank == 0:
            self._reporter.event("pass_not_finished", epoch=self.epoch, untrained=samples - done - self._pass_rows)

    def _new_adapting(self) -> Adapting | None:
        setup = self._setup
        if not setup.batch_size.adaptive:
            return None
        return Adapting(setup.batch_size, setup.adaptation, workers=self.world_size)

    def _voice(self) -> TrainingVoice:
        mail = self._adapting.mail if self._adapting is not None else Mailbox(0)
        return TrainingVoice(self.rank, self.world_size, lambda: self._reporter.orders, self._committer.due, mail)

    def _followed(self) -> bool:
        """Whether another pass will follow this one: its preprocessing may begin early."""
        samples = self._setup.sized[TRAIN]
        if self._adapting is None or samples is None:
            return self.epoch + 1 < self._epochs_total
        progress, size = self._state.progress, self._split.global_batch_size
        left = samples - len(progress.trained)
        after = progress.useful + left * self._adapting.useful(size) / size
        return after < (self._epochs_total - ROUNDING) * samples

    def _begin_global_batch(self, split: BatchSplit) -> None:
        if split != self._split:
            self._split = split
            self._changes += 1
            if self.rank == 0:
                self._reporter.event(
                    "rebatched",
                    epoch=self.epoch,
                    step=self._state.progress.step,
                    local_batch_size=split.local_batch_size,
                    accum_steps=split.accum_steps,
                    global_batch_size=split.global_batch_size,
                )
        self._stepper.begin_global_batch(split)

    def _heard(self, heard: Heard) -> None:
        if self._adapting is not None:
            self._adapting.heard(heard.measured)

    def _plain_batches(self, batches: Batches, name: str) -> Iterator[dict[str, Any]]:
        while (batch := self._get(batches)) is not None:
            self._note_skipped(batch.skipped, name)
            if batch.rows:
                yield dict(batch.tensors)
        self._note_skipped(batches.leftover, name)

    def _next_batch(self, batches: Batches, since: float | None = None) -> tuple[LocalBatch | None, float, float]:
        """(batch or the end, seconds waited for this rank's own samples, seconds waited for another's), from now, or ``since``."""
        asked = time.monotonic() if since is None else since
        batch = self._get(batches)
        waited = time.monotonic() - asked
        own = waited if batch is None else min(max(batch.own_ready_s - asked, 0.0), waited)
        return batch, own, waited - own

    def _get(self, batches: Batches) -> LocalBatch | None:
        with self._watchdog.waiting():
            return batches.get()

    def _start_batch(self, following: tuple[LocalBatch | None, float, float], *, first: bool = False) -> None:
        batch, own, peer = following
        if batch is not None:
            self._meter.waited(own, peer, batch.rows, first=first)
            self._note_skipped(batch.skipped, TRAIN)
            self._heard(batch.heard)

    def _has_another(self) -> bool:
        """Whether the pass has another micro-batch. Only asked while gradients accumulate."""
        if not self._ahead:
            with self._meter.paused():
                self._ahead.append(self._next_batch(self._peek_at))
        batch = self._ahead[0][0]
        return batch is not None and not batch.heard.end

    def _note_skipped(self, skipped: Sequence[Skipped], dataset: str) -> None:
        for each in skipped:
            self._reporter.event(
                "skipped", dataset=dataset, sample_id=each.sample_id, reason=each.reason, epoch=self.epoch
            )

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a loss that is the mean over the current batch.

        Weighted so that the optimizer sees the mean over all samples of the global batch, however unequal the workers'
        parts are, and scaled for fp16. Gradients are exchanged with the global batch's last micro-batch.
        """
        self._stepper.backward(loss, self._has_another)

    def step(self, *, clip_norm: float | None = None) -> bool:
        """Step the prepared optimizers and clear their gradients, if the global batch is complete; returns whether.

        ``clip_norm`` clips the norm of the whole gradient first. Raises ConfigError where it is not above 0.
        """
        if clip_norm is not None:
            clip_norm = check_number("ctx.step(clip_norm=...)", clip_norm, above=0.0, infinite=True, sane="such as 1.0")
        samples = self._setup.sized[TRAIN]
        passes = self._state.progress.samples / samples if samples else float(self.epoch)
        rows = self._stepper.step(clip_norm=clip_norm, passes=passes)
        if not rows:
            return False
        self._pass_rows += rows
        self._tell_progress()
        if self._first_step and self.rank == 0:
            self._reporter.event("first_step", step=self._state.progress.step, workers=self.world_size)
        self._first_step = False
        self._reporter.totals = self._meter.totals()
        return True

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, value: Any) -> float:
        """The sum of a number over all workers. All workers must call it."""
        return self._sum_over_ranks([_number("ctx.sum(value)", value)])[0]

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        with self._watchdog.waiting():
            return values if self._talk is None else self._talk.sum(values)

    def accumulate(self, **values: Any) -> None:
        """Add numbers or tensors to this epoch's sums, for a batch of ``ctx.batches("train")`` behind its ``ctx.step()``:
        ``ctx.accumulate(loss=loss.detach() * rows, rows=rows)``."""
        self._state.accumulate({name: _number(f"ctx.accumulate({name}=...)", value) for name, value in values.items()})

    def accumulated(self) -> dict[str, float]:
        """This epoch's sums over all workers. They count each sample once, however often workers were restarted or their
        number changed. All workers must call it."""
        with self._watchdog.waiting():
            return self._state.accumulated()

    def report(self, **metrics: Any) -> None:
        """Record metrics (numbers or tensors; the mean over the workers). All workers must call it equally often."""
        names = sorted(metrics)
        values = [_number(f"ctx.report({name}=...)", metrics[name]) for name in names]
        values = [v / self.world_size for v in self._sum_over_ranks(values)]
        self._reported.update(zip(names, values, strict=True))
        self._reporter.metrics(self._reported)
        if self.rank == 0:
            self._reporter.event(
                "report",
                epoch=self.epoch,
                step=self._state.progress.step,
                metrics=dict(zip(names, values, strict=True)),
            )
        self._meter.restart()

    def _agreed_end(self) -> End:
        """Rank 0's word: orders reach the ranks at different times."""
        orders = self._reporter.orders
        mine: End = "stop" if orders.stop else "resize" if orders.resize else ""
        agreed: End = mine if self._talk is None else self._talk.broadcast(mine, 0)
        return agreed

    def _commit(self, reason: str) -> None:
        self._committer.commit(reason, self._reported, self._adaptation_state())
        self._meter.restart()

    def _adaptation_state(self) -> dict[str, Any]:
        if self._adapting is None:
            return {}
        return {
            "noise": self._adapting.to_state(),
            "workers": self.world_size,
            "batch": [self._split.local_batch_size, self._split.accum_steps],
            "learned": self._reporter.orders.learned or self._state.adapting.get("learned"),
        }

    def _first_split(self, orders: Orders) -> BatchSplit:
        """How global batches are cut at first: as ordered, or as the checkpoint had it, or as the user said."""
        stored, sizes = self._state.adapting, self._setup.batch_size
        before: tuple[int, int, int] | None = orders.batch
        if before is None and stored:
            before = stored["workers"], *stored["batch"]
        if before is None:
            split = sizes.split(self.world_size)
        else:
            workers, local, accum = before
            last = BatchSplit(local_batch_size=local, accum_steps=accum, workers=workers)
            split = sizes.carried_over(last, self.world_size)
        return split.with_local_at_most(orders.most_local)

    def _resume(self) -> None:
        if not self._state.resumed:
            return
        progress = self._state.progress
        if self._adapting is not None and self._state.adapting:
            self._adapting.restore(self._state.adapting["noise"])
        self.epoch = self._reporter.epoch = progress.epoch
        self._tell_progress()
        if self.rank == 0:
            self._reporter.event(
                "resumed",
                attempt=self._attempt,
                epoch=progress.epoch,
                step=progress.step,
                trained=len(progress.trained),
                epoch_starts_again=self._state.changed,
                damaged=self._state.damaged,
            )

    def _tell_progress(self) -> None:
        progress = self._state.progress
        self._reporter.step, self._reporter.samples = progress.step, progress.samples
        noise = None if self._adapting is None else self._adapting.noise.whole
        self._reporter.adapted = Adapted(
            workers=self.world_size,
            batch=(self._split.local_batch_size, self._split.accum_steps),
            changes=self._changes,
            useful=progress.useful,
            noise=None if noise is None else (noise.sqr, noise.var),
            goal=self._goal(),
            learned=self._state.adapting.get("learned"),
            most_local=self._stepper.most_local,
        )

    def _goal(self) -> float | None:
        """The progress that training ends at, in samples; None where it is not known."""
        samples = self._setup.sized[TRAIN]
        return None if samples is None else float(self._epochs_total * samples)

    def _share_buffers(self) -> None:
        """Rank 0's buffers (running statistics) to all, where validation starts."""
        if self.world_size > 1 and self._state.model is not None:
            for buffer in self._state.model.buffers():
                dist.broadcast(buffer, src=0)

    def out_of_memory(self, error: BaseException) -> None:
        """The user's function could not go on for want of device memory. Raises DeviceMemoryError where smaller batches may do:
        the workers then start again with those."""
        batch = self._stepper.batch
        if batch is None:
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        # Alone, nothing is lost: the model is as the last step left it. With others there is no telling what they did.
        if self.world_size == 1 and self._state.uncommitted and not self._stepper.stepping:
            self._commit("out_of_memory")
        if ray.get(self._setup.hub.out_of_memory.remote(self.rank, batch.split)):
            self._reporter.flush()
            raise DeviceMemoryError(
                f"local batches of {batch.split.local_batch_size} samples do not fit: {error}"
            ) from error

    def printing(self) -> Forward:
        """Where ``print`` goes in the user's function: to the driver."""
        return Forward(self._reporter, sys.stdout)

    def commit_rest(self) -> None:
        """Commit what was trained since the last checkpoint."""
        if self._state.uncommitted:
            self._commit("end")

    def finish(self) -> None:
        """Push the last measurements."""
        self._reporter.totals = self._meter.totals()
        self._reporter.close()


def _number(name: str, value: Any) -> float:
    """A number, or a tensor or array of one element, as a float; NaN and infinity, too: a loss may be either. Raises RunError
    for anything else."""
    try:
        return float(value.detach().item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
        raise RunError(f"{name} takes a number, or a tensor of one element, found {found}.") from None


def tuple_of(batch: Mapping[str, Any], columns: Sequence[str]) -> tuple[Any, ...]:
    """Some columns of a batch, in their order. Raises RunError for one that it does not have."""
    missing = [name for name in columns if name not in batch]
    if missing:
        raise RunError(f"there is no column {missing[0]!r}; a batch has {', '.join(batch)}.")
    return tuple(batch[name] for name in columns)


def first_pass(split: BatchSplit, *, deterministic: bool) -> PassRequest:
    """The pass that every new run begins with; the driver starts it while the workers are being started."""
    first_rows = split.local_batch_size * split.workers
    batch = split.global_batch_size if deterministic else None
    return PassRequest(world_size=split.workers, first_rows=first_rows, epoch=0, batch=batch)


def run_worker(user_function: Any, setup: WorkerSetup) -> None:
    """What each worker runs: the user's function with its context."""
    if setup.marker is not None:
        setup.marker.check()
    seed = setup.seed + ray.train.get_context().get_world_rank()
    torch.manual_seed(setup.seed)  # the same for all ranks while the model is built
    np.random.seed(seed & 0xFFFFFFFF)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = Context(setup)
    try:
        with contextlib.redirect_stdout(context.printing()):
            run_user_function(user_function, context)
        context.commit_rest()
    except torch.OutOfMemoryError as error:
        context.out_of_memory(error)
        raise
    except StopRun:
        pass
    finally:
        context.finish()


def run_user_function(user_function: Any, context: Context) -> None:
    """Call the user's training function. Raises RunError where it exits: that would end this process without a word."""
    try:
        user_function(context)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RunError(_exit_of(user_function, error, context.rank)) from error


def _exit_of(user_function: Any, error: BaseException, rank: int) -> str:
    name = getattr(user_function, "__name__", "the training function")
    did = "raised KeyboardInterrupt"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else shown(error.code)})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{name}() {did} on rank {rank}{where}. Return from it to end the training, or raise an exception that says what is wrong."


__all__ = ["Context", "Peers", "StopRun", "WorkerSetup", "run_user_function", "run_worker"]
