"""The worker's side of training: what the user's function gets as ``ctx``.

A plain PyTorch loop stays a loop; the context brings batches that were preprocessed elsewhere, keeps gradients exact when
ranks hold unequal batches, measures where time goes, and commits what resuming needs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from offload.errors import RunError
from offload.measure.steps import Clock, CudaClock, StepMeter, Totals
from offload.pipeline.passes import PassKey, PassRequest
from offload.pipeline.ranges import Ranges
from offload.pipeline.spec import OnDevice
from offload.pipeline.wire import Columns
from offload.train.batches import ActorFeed, Batches, LocalBatch, NoPeers, Peers, Skipped, open_pass
from offload.train.config import BatchSplit, Checkpoints, Precision
from offload.train.monitor import Forward, Reporter
from offload.train.peers import DistPeers
from offload.train.state import TrainingState

TRAIN = "train"


class StopRun(BaseException):
    """Unwinds the user's function after the last commit of a run that was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """Everything the driver tells a worker."""

    hub: Any
    split: BatchSplit
    on_device: dict[str, tuple[OnDevice, ...]]
    sized: dict[str, int | None]
    resumable: dict[str, bool]
    checkpoints: Checkpoints
    precision: Precision
    seed: int
    config: dict[str, Any]


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
        self._wrapped: torch.nn.Module | None = None
        names = sorted(setup.sized)
        self._peers = {name: DistPeers() if self.world_size > 1 else NoPeers() for name in names}
        self._talk: DistPeers | None = DistPeers() if self.world_size > 1 else None
        attempt: Any = ray.get(setup.hub.begin.remote()) if self.rank == 0 else None
        self._attempt: int = attempt if self._talk is None else self._talk.broadcast(attempt, 0)
        self._reporter = Reporter(setup.hub, self.rank)
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
        self._due_at = time.monotonic()
        self._epochs_total = 1
        self._batch: LocalBatch | None = None
        self._micro = 0
        self._micro_rows = 0
        self._pending: list[np.ndarray[Any, Any]] = []
        self._reported: dict[str, float] = {}
        self._load()

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
        if self.world_size > 1 and any(p.requires_grad for p in plain.parameters()):
            on_gpu = [self.device] if self.device.type == "cuda" else None
            # Buffers are not broadcast before every forward: the ranks' own statistics serve training as well, and
            # validation may then run unequal numbers of batches. They are made equal where validation starts.
            wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=on_gpu, broadcast_buffers=False)
            wrapped.register_comm_hook(None, lambda state, bucket: self._measured_all_reduce(bucket))
            model = wrapped
        self._wrapped = model
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
        under way. At the end of each a checkpoint is committed."""
        self._epochs_total = n
        for epoch in range(self._state.progress.epoch, n):
            self.epoch = epoch
            self._reporter.epoch = epoch
            self._meter.restart()
            yield epoch
            self._state.next_epoch(epoch + 1)
            if (epoch + 1) % self._setup.checkpoints.every_epochs == 0 or epoch + 1 == n:
                self._commit("epoch")
            if self._agreed_stop():
                raise StopRun

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
            first_rows=self._setup.split.local_batch_size * self.world_size,
            epoch=self.epoch if training else 0,
            done=done.pairs,
            followed=training and self.epoch + 1 < self._epochs_total,
        )
        open_pass(self._setup.hub, key, request, self.rank)
        if not training:
            self._share_buffers()
        stop = self._reporter.stop if training else threading.Event()
        batches = Batches(
            ActorFeed(self._setup.hub),
            key,
            peers=self._peers[name],
            local_batch_size=self._setup.split.local_batch_size,
            device=self.device,
            on_device=self._setup.on_device[name],
            padded=training,
            stop=stop,
            template=self._template,
            due=self._checkpoint_due,
        )
        began = time.monotonic()
        try:
            for batch in self._training_batches(batches, began) if training else self._plain_batches(batches, name):
                yield tuple_of(batch, columns) if columns else batch
        finally:
            batches.close()
            self._meter.restart()

    def _training_batches(self, batches: Batches, began: float) -> Iterator[dict[str, Any]]:
        self._ahead: list[tuple[LocalBatch | None, float, float]] = []
        self._peek_at = batches
        following = self._next_batch(batches)
        self._start_batch(following)
        if following[0] is not None:
            self._reporter.event("first_batch", epoch=self.epoch, seconds=round(time.monotonic() - began, 3))
        due = False
        while (batch := following[0]) is not None:
            due = due or batch.due
            if batch.stop:
                self._commit("stop")
                raise StopRun
            if due and self._micro == 0:  # between global batches, the same one on all ranks
                self._commit("interval")
                due = False
            self._batch = batch
            yield dict(batch.tensors)
            if not self._stepped():
                raise RunError(
                    "a batch went by without ctx.step(). Call ctx.backward(loss) and ctx.step() once for each batch of "
                    "ctx.batches('train')."
                )
            following = self._ahead.pop() if self._ahead else self._next_batch(batches)
            self._start_batch(following)
        self._note_skipped(batches.leftover, TRAIN)

    def _stepped(self) -> bool:
        return self._batch is None

    def _plain_batches(self, batches: Batches, name: str) -> Iterator[dict[str, Any]]:
        while (batch := batches.get()) is not None:
            self._note_skipped(batch.skipped, name)
            if batch.rows:
                yield dict(batch.tensors)
        self._note_skipped(batches.leftover, name)

    def _next_batch(self, batches: Batches) -> tuple[LocalBatch | None, float, float]:
        """(batch or the end, seconds waited for this rank's own samples, seconds waited for another's)."""
        asked = time.monotonic()
        batch = batches.get()
        waited = time.monotonic() - asked
        own = waited if batch is None else min(max(batch.own_ready_s - asked, 0.0), waited)
        return batch, own, waited - own

    def _start_batch(self, following: tuple[LocalBatch | None, float, float]) -> None:
        batch, own, peer = following
        if batch is not None:
            self._meter.waited(own, peer, batch.rows)
            self._note_skipped(batch.skipped, TRAIN)

    def _has_another(self) -> bool:
        """Whether the pass has another micro-batch. Only asked while gradients accumulate."""
        if not self._ahead:
            with self._meter.paused():
                self._ahead.append(self._next_batch(self._peek_at))
        batch = self._ahead[0][0]
        return batch is not None and not batch.stop

    def _note_skipped(self, skipped: Sequence[Skipped], dataset: str) -> None:
        for each in skipped:
            self._reporter.event(
                "skipped", dataset=dataset, sample_id=each.sample_id, reason=each.reason, epoch=self.epoch
            )

    def _checkpoint_due(self) -> bool:
        """Whether ``every_s`` has passed since the last checkpoint, or since this said so. Asked ahead of training."""
        every_s, now = self._setup.checkpoints.every_s, time.monotonic()
        if every_s is None or now - max(self._due_at, self._state.committed_at) < every_s:
            return False
        self._due_at = now
        return True

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a loss that is the mean over the current batch.

        Weighted so that the optimizer sees the mean over all samples of the global batch, however unequal the workers'
        parts are, and scaled for fp16. Gradients are exchanged with the global batch's last micro-batch.
        """
        batch = self._batch
        if batch is None:
            raise RunError("ctx.backward(loss) belongs into the loop over ctx.batches('train'), once per batch.")
        split = self._setup.split
        last = self._micro == split.accum_steps or not self._has_another()
        # A lone micro-batch knows the rows of its global batch; one of several assumes full ones and step() corrects.
        goal = batch.all_rows if split.accum_steps == 0 else split.global_batch_size
        weight = batch.rows * self.world_size / goal
        scaled = loss if weight == 1.0 else loss * weight
        if self._state.scaler is not None:
            scaled = self._state.scaler.scale(scaled)
        joined = self._wrapped
        quiet = (
            joined.no_sync()
            if not last and isinstance(joined, torch.nn.parallel.DistributedDataParallel)
            else contextlib.nullcontext()
        )
        with quiet:
            scaled.backward()
        self._meter.backward_done()
        self._micro_rows += batch.all_rows
        self._last = last

    def step(self, *, clip_norm: float | None = None) -> bool:
        """Step the prepared optimizers and clear their gradients, if the global batch is complete; returns whether.

        ``clip_norm`` clips the norm of the whole gradient first.
        """
        batch = self._batch
        if batch is None:
            raise RunError("ctx.step() belongs behind ctx.backward(loss), once per batch of ctx.batches('train').")
        self._pending.append(batch.positions)
        self._batch = None
        if not self._last:
            self._micro += 1
            self._meter.micro_batch_done()
            return False
        parameters = [
            p for o in self._state.optimizers for g in o.param_groups for p in g["params"] if p.grad is not None
        ]
        if self._state.scaler is not None:
            for optimizer in self._state.optimizers:
                self._state.scaler.unscale_(optimizer)
        if self._setup.split.accum_steps and self._micro_rows != self._setup.split.global_batch_size:
            torch._foreach_mul_([p.grad for p in parameters], self._setup.split.global_batch_size / self._micro_rows)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        for optimizer in self._state.optimizers:
            if self._state.scaler is not None:
                self._state.scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self._state.scaler is not None:
            self._state.scaler.update()
        self._meter.stepped()
        self._state.stepped(self._pending, self._micro_rows)
        self._pending, self._micro, self._micro_rows = [], 0, 0
        self._tell_progress()
        self._reporter.totals = self._meter.totals()
        return True

    def _measured_all_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's own all-reduce, with a mark at each bucket that becomes ready."""
        self._meter.last_gradient()
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the world's group

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, value: Any) -> float:
        """The sum of a number over all workers. All workers must call it."""
        number = float(value.item() if isinstance(value, torch.Tensor) else value)
        return number if self._talk is None else self._talk.sum([number])[0]

    def report(self, **metrics: Any) -> None:
        """Record metrics (numbers or tensors; the mean over the workers). All workers must call it equally often."""
        names = sorted(metrics)
        values = [
            float(metrics[n].detach().item() if isinstance(metrics[n], torch.Tensor) else metrics[n]) for n in names
        ]
        if self._talk is not None:
            values = [v / self.world_size for v in self._talk.sum(values)]
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

    def _all_agree(self, mine: bool) -> bool:
        """Rank 0's word: clocks differ."""
        return mine if self._talk is None else bool(self._talk.broadcast(mine, 0))

    def _agreed_stop(self) -> bool:
        return self._all_agree(self._reporter.stop.is_set())

    def _commit(self, reason: str) -> None:
        began = time.monotonic()
        self._state.commit(self._reported)
        if self.rank == 0:
            progress = self._state.progress
            seconds = round(self._state.committed_at - began, 3)
            self._reporter.event("checkpoint", reason=reason, epoch=progress.epoch, step=progress.step, seconds=seconds)
        self._meter.restart()

    def _load(self) -> None:
        self._state.load()
        if not self._state.resumed:
            return
        progress = self._state.progress
        self.epoch = self._reporter.epoch = progress.epoch
        self._tell_progress()
        if self.rank == 0:
            self._reporter.event(
                "resumed",
                epoch=progress.epoch,
                step=progress.step,
                trained=len(progress.trained),
                epoch_starts_again=self._state.changed,
            )

    def _tell_progress(self) -> None:
        self._reporter.step, self._reporter.samples = self._state.progress.step, self._state.progress.samples

    def _share_buffers(self) -> None:
        """Rank 0's buffers (running statistics) to all, where validation starts."""
        if self.world_size > 1 and self._state.model is not None:
            for buffer in self._state.model.buffers():
                dist.broadcast(buffer, src=0)

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


def tuple_of(batch: Mapping[str, Any], columns: Sequence[str]) -> tuple[Any, ...]:
    """Some columns of a batch, in their order. Raises RunError for one that it does not have."""
    missing = [name for name in columns if name not in batch]
    if missing:
        raise RunError(f"there is no column {missing[0]!r}; a batch has {', '.join(batch)}.")
    return tuple(batch[name] for name in columns)


def first_pass(split: BatchSplit) -> PassRequest:
    """The pass that every new run begins with; the driver starts it while the workers are being started."""
    return PassRequest(world_size=split.workers, first_rows=split.local_batch_size * split.workers, epoch=0)


def run_worker(user_function: Any, setup: WorkerSetup) -> None:
    """What each worker runs: the user's function with its context."""
    seed = setup.seed + ray.train.get_context().get_world_rank()
    torch.manual_seed(setup.seed)  # the same for all ranks while the model is built
    np.random.seed(seed & 0xFFFFFFFF)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = Context(setup)
    try:
        with contextlib.redirect_stdout(context.printing()):
            user_function(context)
        context.commit_rest()
    except StopRun:
        pass
    finally:
        context.finish()


def world_totals(totals: Mapping[int, Totals]) -> Totals:
    """The ranks' totals together."""
    together = Totals()
    for each in totals.values():
        together = together.plus(each)
    return together


__all__ = ["Context", "Peers", "StopRun", "WorkerSetup", "run_worker", "world_totals"]
