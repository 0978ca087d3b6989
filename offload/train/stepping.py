"""From local batches to optimizer steps: gradients in which every sample of a global batch weighs the same, however unequal the
ranks' parts are, accumulated where a global batch comes in several micro-batches.

Where it stops: which batch comes next, and what is told of a step, is the context's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from offload.errors import RunError
from offload.measure.steps import StepMeter
from offload.train.adapting import Adapting
from offload.train.batches import LocalBatch
from offload.train.config import BatchSplit
from offload.train.device_memory import DeviceMemory
from offload.train.state import TrainingState
from offload.train.watchdog import Watchdog


class Stepper:
    """Of one rank.

    Args:
        state: of training, with the optimizers and the scaler.
        meter, watchdog: are told of every half of a step.
        rank, workers: this one, and how many there are.
        adapting: measures gradient noise and scales learning rates; None where batches are fixed.
        memory: of the device.

    Attributes:
        model: as :meth:`join` returned it.
        batch: the local batch under way; None between two.
        stepping: whether the optimizers are being stepped: a failure meanwhile leaves them in between.
        most_local: the largest local batch that fits into the device's memory, as far as that is known.
    """

    def __init__(
        self,
        state: TrainingState,
        meter: StepMeter,
        watchdog: Watchdog,
        *,
        rank: int,
        workers: int,
        adapting: Adapting | None,
        memory: DeviceMemory,
    ) -> None:
        self.batch: LocalBatch | None = None
        self.stepping = False
        self.most_local: int | None = None
        self._state, self._meter, self._watchdog = state, meter, watchdog
        self._rank, self._workers, self._adapting, self._memory = rank, workers, adapting, memory
        self.model: torch.nn.Module | None = None
        self._went_backward = self._is_last = False
        self._micro_batches = self._rows = 0
        self._trained: list[np.ndarray[Any, Any]] = []

    def join(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """The model, joined with those of the other workers, where there are several."""
        if self._workers > 1 and any(p.requires_grad for p in model.parameters()):
            on_gpu = [device] if device.type == "cuda" else None
            # Buffers are not broadcast before every forward: the ranks' own statistics serve training as well, and
            # validation may then run unequal numbers of batches. They are made equal where validation starts.
            joined = torch.nn.parallel.DistributedDataParallel(model, device_ids=on_gpu, broadcast_buffers=False)
            joined.register_comm_hook(None, lambda state, bucket: self._measured_all_reduce(bucket))
            model = joined
        self.model = model
        return model

    @property
    def between_global_batches(self) -> bool:
        """Whether nothing is accumulated."""
        return self._micro_batches == 0

    def begin_global_batch(self, split: BatchSplit) -> None:
        """Before the first micro-batch of a global batch."""
        if self._adapting is not None:
            self._memory.between_batches()
            self._adapting.begin_step(self._state.progress.step, split, self._state.scaler)

    def take(self, batch: LocalBatch) -> None:
        """The next local batch is the user's."""
        self.batch, self._went_backward = batch, False

    def backward(self, loss: torch.Tensor, has_another: Callable[[], bool]) -> None:
        """Accumulate the gradient of a loss that is the mean over the local batch. ``has_another`` is asked only while gradients
        accumulate: whether the pass goes on behind this micro-batch."""
        batch = self.batch
        if batch is None:
            raise RunError("ctx.backward(loss) belongs into the loop over ctx.batches('train'), once per batch.")
        if self._went_backward:
            raise RunError(
                "ctx.backward(loss) was called twice for one batch. Add the losses up first: ctx.backward(loss + other)."
            )
        self._went_backward = True
        split = batch.split
        last = self._micro_batches == split.accum_steps or not has_another()
        # A lone micro-batch knows the rows of its global batch; one of several assumes full ones and step() corrects.
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
        """Step the optimizers and clear their gradients, if the global batch is complete. Returns its rows then, 0 otherwise.
        ``passes``: how many were trained so far, for learning rates that warm up."""
        batch = self.batch
        if batch is None:
            raise RunError("ctx.step() belongs behind ctx.backward(loss), once per batch of ctx.batches('train').")
        if not self._went_backward:
            # Where other ranks went backward, they wait for this one's gradients: ended with it, they do not hang.
            raise RunError(
                f"worker {self._rank} called ctx.step() for a batch without ctx.backward(loss). Every worker goes backward for "
                "every batch; one that has no samples gets a filler that weighs nothing."
            )
        self._trained.append(batch.positions)
        self.batch = None
        if not self._is_last:
            self._micro_batches += 1
            self._meter.micro_batch_done()
            return 0
        self._finish_gradients(batch.split, clip_norm)
        rows = self._rows
        useful = float(rows) if self._adapting is None else self._adapting.useful(rows)
        self._step_optimizers(passes, useful / max(rows, 1))
        self._state.stepped(self._trained, rows, useful)
        self._trained, self._micro_batches, self._rows = [], 0, 0
        return rows

    def _finish_gradients(self, split: BatchSplit, clip_norm: float | None) -> None:
        """Unscaled, of the mean over the rows that there were, measured, clipped."""
        optimizers, scaler = self._state.optimizers, self._state.scaler
        parameters = [p for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if split.accum_steps and self._rows != split.global_batch_size:
            torch._foreach_mul_([p.grad for p in parameters], split.global_batch_size / self._rows)
        if self._adapting is not None:
            self.most_local = self._memory.largest(split.local_batch_size)
            self._adapting.end_step(self._state.progress.step, split, self._rows)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)

    def _step_optimizers(self, passes: float, efficiency: float) -> None:
        adapting, scaler = self._adapting, self._state.scaler
        self.stepping = True
        with contextlib.nullcontext() if adapting is None else adapting.scaled_rates(self._rows, passes):
            step_all(self._state.optimizers, scaler)
        self.stepping = False
        self._meter.stepped(efficiency)
        self._watchdog.alive()

    def _measured_all_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's own all-reduce, with a mark at each bucket that becomes ready."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # slow, and seldom needed

        self._meter.last_gradient()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the world's group


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
