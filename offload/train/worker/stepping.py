"""Turn local batches into optimizer steps. Every sample of a global batch has the same weight in the gradient, even if the ranks'
parts are unequal. A global batch of several micro-batches accumulates gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from offload.errors import RunError
from offload.measure.steps import StepMeter
from offload.model.batch_split import BatchSplit
from offload.train.worker.batch_scaling import BatchScaling
from offload.train.worker.batches import LocalBatch
from offload.train.worker.device_memory import DeviceMemory
from offload.train.worker.state import TrainingState
from offload.train.worker.watchdog import Watchdog


class Stepper:
    """The optimizer steps of one rank.

    Args:
        state: the training state, with the optimizers and the scaler.
        meter, watchdog: receivers of every half of a step.
        rank, workers: this rank, and the number of ranks.
        scaling: measures gradient noise and scales learning rates; None if batches are fixed.
        join: joins a model with those of the other workers.
        memory: the memory of the device.

    Attributes:
        model: the result of :meth:`join`.
        batch: the current local batch; None between two batches.
        stepping: whether the optimizers are stepping: a failure meanwhile leaves them half updated.
        most_local: the largest local batch that fits into the device's memory, as far as known.
    """

    def __init__(
        self,
        state: TrainingState,
        meter: StepMeter,
        watchdog: Watchdog,
        *,
        rank: int,
        workers: int,
        scaling: BatchScaling | None,
        join: Join,
        memory: DeviceMemory,
    ) -> None:
        self.batch: LocalBatch | None = None
        self.stepping = False
        self.most_local: int | None = None
        self._state, self._meter, self._watchdog = state, meter, watchdog
        self._rank, self._workers, self._scaling, self._join, self._memory = rank, workers, scaling, join, memory
        self.model: torch.nn.Module | None = None
        self._went_backward = self._is_last = False
        self._micro_batches = self._rows = 0
        self._trained: list[np.ndarray[Any, Any]] = []

    def join(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model, joined with those of the other workers if there are several."""
        if self._workers > 1 and any(p.requires_grad for p in model.parameters()):
            model = self._join(model, self._meter.last_gradient)
        self.model = model
        return model

    @property
    def between_global_batches(self) -> bool:
        """Whether no gradient is accumulated."""
        return self._micro_batches == 0

    def begin_global_batch(self, split: BatchSplit) -> None:
        """Prepare for the first micro-batch of a global batch."""
        if self._scaling is not None:
            self._memory.between_batches()
            self._scaling.begin_step(self._state.progress.step, split, self._state.scaler)

    def take(self, batch: LocalBatch) -> None:
        """Note that the user gets the next local batch."""
        self.batch, self._went_backward = batch, False

    def backward(self, loss: torch.Tensor, has_another: Callable[[], bool]) -> None:
        """Accumulate the gradient of a loss that is the mean over the local batch. ``has_another`` returns whether the pass goes on after
        this micro-batch; it is called only while gradients accumulate."""
        batch = self.batch
        if batch is None:
            raise RunError("call ctx.backward(loss) in the loop over ctx.batches('train'), once per batch.")
        if self._went_backward:
            raise RunError(
                "ctx.backward(loss) was called twice for one batch. Add the losses up first: ctx.backward(loss + other)."
            )
        self._went_backward = True
        split = batch.split
        last = self._micro_batches == split.accum_steps or not has_another()
        # A single micro-batch knows the rows of its global batch; one of several assumes full ones, and step() corrects that.
        goal = batch.all_rows if split.accum_steps == 0 else split.global_batch_size
        weight = batch.rows * self._workers / goal
        scaled = loss if weight == 1.0 else loss * weight
        if self._state.scaler is not None:
            scaled = self._state.scaler.scale(scaled)
        model = self.model
        quiet = (
            model.no_sync()
            if not last and isinstance(model, torch.nn.parallel.DistributedDataParallel)
            else contextlib.nullcontext()
        )
        with quiet:
            scaled.backward()  # type: ignore[no-untyped-call]
        self._meter.backward_done()
        self._watchdog.alive()
        self._rows += batch.all_rows
        self._is_last = last

    def step(self, *, clip_norm: float | None, passes: float) -> int:
        """Step the optimizers and clear their gradients, if the global batch is complete. Return its rows, or 0 if it is not complete.
        ``passes``: the number of passes trained so far, for learning rates that warm up."""
        batch = self.batch
        if batch is None:
            raise RunError("call ctx.step() after ctx.backward(loss), once per batch of ctx.batches('train').")
        if not self._went_backward:
            # Ranks that called backward() wait for this rank's gradients. They end with it, so they do not hang.
            raise RunError(
                f"worker {self._rank} called ctx.step() for a batch without ctx.backward(loss). Every worker must call it for "
                "every batch; a worker without samples gets a filler that weighs nothing."
            )
        self._trained.append(batch.positions)
        self.batch = None
        if not self._is_last:
            self._micro_batches += 1
            self._meter.micro_batch_done()
            return 0
        self._finish_gradients(batch.split, clip_norm)
        rows = self._rows
        useful = float(rows) if self._scaling is None else self._scaling.useful(rows)
        self._step_optimizers(passes, useful / max(rows, 1))
        self._state.stepped(self._trained, rows, useful)
        self._trained, self._micro_batches, self._rows = [], 0, 0
        return rows

    def _finish_gradients(self, split: BatchSplit, clip_norm: float | None) -> None:
        """Unscale the gradients, correct them for the real rows, measure and clip them."""
        optimizers, scaler = self._state.optimizers, self._state.scaler
        parameters = [p for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if split.accum_steps and self._rows != split.global_batch_size:
            torch._foreach_mul_([p.grad for p in parameters], split.global_batch_size / self._rows)
        if self._scaling is not None:
            self.most_local = self._memory.largest(split.local_batch_size)
            self._scaling.end_step(self._state.progress.step, split, self._rows)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)

    def _step_optimizers(self, passes: float, efficiency: float) -> None:
        scaling, scaler = self._scaling, self._state.scaler
        self.stepping = True
        with contextlib.nullcontext() if scaling is None else scaling.scaled_rates(self._rows, passes):
            step_all(self._state.optimizers, scaler)
        self.stepping = False
        self._meter.stepped(efficiency)
        self._watchdog.alive()


Join = Callable[[torch.nn.Module, Callable[[], None]], torch.nn.Module]
"""A function that joins a model with those of the other workers, and calls its second argument for each bucket of ready gradients."""


def join_distributed(model: torch.nn.Module, ready: Callable[[], None]) -> torch.nn.Module:
    """A model joined by DistributedDataParallel, with its own all-reduce."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # a slow import, seldom needed

    def all_reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        ready()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the world's group

    device = next(model.parameters()).device
    # Buffers are not broadcast before every forward pass: the ranks' own statistics serve training as well, and validation may
    # then run unequal numbers of batches. Validation makes them equal when it starts.
    joined = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False
    )
    joined.register_comm_hook(None, lambda state, bucket: all_reduce(bucket))  # annotations would have to be DDP's own
    return joined


def step_all(optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None) -> None:
    """Step optimizers whose gradients are unscaled, and clear these."""
    for optimizer in optimizers:
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update()
