"""Turn local batches into optimizer steps. Every sample of a global batch has the same weight in the gradient, even if the ranks'
parts are unequal. A global batch of several micro-batches accumulates gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import RunError
from offload.measure.steps import StepMeter
from offload.model.batch_split import BatchSplit
from offload.pipeline.order.ranges import Ranges
from offload.train.worker.data.batches import LocalBatch
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.steps.batch_scaling import BatchScaling
from offload.train.worker.steps.device_memory import DeviceMemory
from offload.train.worker.steps.gradients import clip_gradients, scale_gradients
from offload.train.worker.steps.joined import JoinedModels
from offload.train.worker.steps.joining import Join
from offload.train.worker.steps.optimizer_steps import OptimizerSteps, needs_closure


@dataclass(frozen=True)
class _Step:
    """One ``ctx.step`` of a batch: its optimizers and the largest norm of their gradient."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    clip_norm: float | None


class GlobalBatch:
    """The part of a global batch that has gone through backward: its weights, and the gradients that accumulate.

    Attributes:
        micro_batches: the micro-batches that are complete.
        rows: the samples of all ranks.
        takes_part: whether samples of this rank count.
        assumed: the weight by which losses are divided: known for a single micro-batch, assumed full for several.
        kept: the weight of the samples that count. The step multiplies gradients by ``assumed / kept``.
        trained: the positions of complete micro-batches.
    """

    def __init__(self) -> None:
        self.micro_batches = self.rows = 0
        self.takes_part = False
        self.assumed = self.kept = 0.0
        self.trained: list[Ranges] = []
        # Each gradient with its parameter, and with torch's count of its changes in place.
        self._accumulated: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def add(self, batch: LocalBatch) -> None:
        """Add the weights of a micro-batch that takes part in the gradient."""
        if self.micro_batches == 0:
            split = batch.split
            # Samples weigh more than one each if tokens count.
            full = (
                split.global_batch_size
                if batch.all_weight == batch.all_rows
                else batch.all_weight * (split.accum_steps + 1)
            )
            # Samples without a token weigh nothing, and a batch may hold no others.
            self.assumed = (batch.all_weight if split.accum_steps == 0 else full) or 1
            self.kept = 0.0
        self.rows += batch.all_rows
        self.kept += batch.all_weight

    def end_micro_batch(self, batch: LocalBatch, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Keep the gradients that the optimizers' parameters have so far, since the loop may clear them."""
        self.trained.append(batch.positions)
        held = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        self._accumulated = [(p, p.grad, p.grad._version) for p in held.values() if p.grad is not None]
        self.micro_batches += 1

    def take_back_gradients(self) -> None:
        """Take back the gradients that the loop has cleared since the last micro-batch, as plain loops do before or after each step."""
        for parameter, gradient, version in self._accumulated:
            if gradient._version != version:
                raise RunError(
                    "the loop changes gradients between the micro-batches of a global batch, as zero_grad(set_to_none=False) does. Leave "
                    "that out: ctx.step() clears the gradients of a complete batch."
                )
            if parameter.grad is None:
                parameter.grad = gradient
        self._accumulated = []


class Stepper:
    """The optimizer steps of one rank.

    A loop may step all optimizers at once, which ends the batch, or one after the other, or call ``optimizer.step()`` itself: then the
    batch ends when the loop takes the next one (:meth:`settle`).

    Args:
        state: the training state, with the optimizers and the scaler.
        meter, watchdog: receivers of every half of a step.
        rank, workers: this rank, and the number of ranks.
        scaling: measures gradient noise and scales learning rates; None if batches are fixed.
        join: joins models with those of the other workers.
        memory: the memory of the device.

    Attributes:
        joined: the trained models.
        batch: the current local batch; None between two batches.
        stepping: whether the optimizers are stepping: a failure meanwhile leaves them half updated.
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
        self._state, self._meter, self._watchdog = state, meter, watchdog
        self._rank, self._workers, self._scaling, self._memory = rank, workers, scaling, memory
        self.joined = JoinedModels(join, meter, workers=workers)
        self._optimizer_steps = OptimizerSteps(state)
        self._went_backward = self._skipped = self._is_last = False
        self._global = GlobalBatch()
        self._done: list[_Step] = []  # the steps of this batch
        self._plain: list[_Step] = []  # those of them that the loop has made itself, by optimizer.step()
        self._in_plain = False  # the loop is making one itself
        self._usual: list[_Step] = []  # the steps of the last batch that was not skipped: skipped ones repeat them

    def join(self, models: Sequence[torch.nn.Module], options: Mapping[str, Any] | None) -> list[torch.nn.Module]:
        """Return the trained models, joined with those of the other workers. ``options``: arguments of DistributedDataParallel; None:
        exchange gradients before steps."""
        for optimizer in self._state.optimizers:
            optimizer.register_step_pre_hook(self._before_plain_step)
            optimizer.register_step_post_hook(self._after_plain_step)
        return self.joined.adopt(models, options, self._missing_weight)

    # -- a batch ---------------------------------------------------------------------------------------------------

    @property
    def between_global_batches(self) -> bool:
        """Whether no gradient is accumulated."""
        return self._global.micro_batches == 0

    @property
    def within_global_batch(self) -> bool:
        """Whether samples of a global batch are under way or accumulated."""
        return self.batch is not None or not self.between_global_batches

    def begin_global_batch(self, split: BatchSplit) -> None:
        """Prepare for the first micro-batch of a global batch."""
        if self._scaling is not None:
            self._memory.between_batches()
            self._scaling.begin_step(self._state.progress.step, split, self._state.scaler)

    def abandon(self) -> None:
        """Forget the batch and the accumulated gradients of a pass that the loop has broken off."""
        if self._global.micro_batches or self._global.rows:
            self._clear_gradients()
        self._global, self.batch = GlobalBatch(), None

    def _clear_gradients(self) -> None:
        for optimizer in self._state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def begin_batch(self, batch: LocalBatch) -> None:
        """Note that the user gets the next local batch."""
        self.batch = batch
        self._went_backward = self._skipped = False
        self.stepping = self._in_plain = False
        if self.between_global_batches:
            self._global.takes_part = False
            self.joined.begin_global_batch()
        self.joined.begin_batch(exchanges=self._global.micro_batches == batch.split.accum_steps)
        self._is_last = batch.split.accum_steps == 0
        self._done, self._plain = [], []

    def backward(self, loss: torch.Tensor, has_another: Callable[[], bool], *, retain_graph: bool = False) -> None:
        """Accumulate the gradient of a loss that is the mean over the local batch. ``has_another`` returns whether the pass goes on after
        this micro-batch; it is called only while gradients accumulate."""
        batch = self.batch
        if batch is None:
            raise RunError(
                "call ctx.backward(loss) in the loop over ctx.batches('train'), before the ctx.step() that ends the batch. To step several "
                "times on one batch, name the optimizer: ctx.step(optimizer)."
            )
        if loss.grad_fn is not None:
            self._check_prepared()
        if self._went_backward:
            self.joined.check_forward()
        if not self._went_backward and not self._skipped:
            self._begin_gradient(batch, has_another)
        self._went_backward = True
        self._global.takes_part = self._global.takes_part or batch.weight > 0
        # The ranks' gradients become their mean. So a rank's mean loss over w of the W samples counts w * workers / W times.
        weight = batch.weight * self._workers / self._global.assumed
        # Usually 1, where all parts are equal: no need for another kernel.
        scaled = loss if weight == 1.0 else loss * weight
        if self._state.scaler is not None:
            scaled = self._state.scaler.scale(scaled)
        if batch.weight or self.joined.sharded or bool(torch.isfinite(loss.detach()).all()):
            self.joined.backward(scaled, retain_graph=retain_graph, exchanges=self._is_last)
        else:  # a filler's loss may be a mean over no tokens, and 0 * nan is not 0
            self.joined.add_nothing(self._state.scaler, exchanges=self._is_last)
        self._meter.backward_done()
        self._watchdog.alive()

    def skip(self, has_another: Callable[[], bool]) -> None:
        """Let this rank's part of the batch add nothing to the gradient."""
        batch = self.batch
        if batch is None:
            raise RunError("call ctx.skip() in the loop over ctx.batches('train').")
        if self._done or self._plain:
            raise RunError(
                "ctx.skip() was called after a step on the same batch. Call it before the batch's first step."
            )
        if self._went_backward:
            raise RunError(
                "ctx.skip() was called after ctx.backward(loss). Call it instead, for a batch that should not count."
            )
        if self._skipped:
            return
        self._begin_gradient(batch, has_another)
        self._skipped = True
        if self.between_global_batches:  # a loop with its own steps may not have cleared them yet
            self._clear_gradients()
        if self.joined.sharded:  # then all ranks skip
            self._global.kept -= batch.all_weight
        elif self._workers == 1:  # with more ranks, one factor must hold for all, and they do not know who skips
            self._global.kept -= batch.weight
        self.joined.add_nothing(self._state.scaler, exchanges=self._is_last)
        self._meter.backward_done()
        self._watchdog.alive()

    def _begin_gradient(self, batch: LocalBatch, has_another: Callable[[], bool]) -> None:
        """Note the weights of a batch that takes part in the global batch's gradient."""
        self._global.take_back_gradients()
        split = batch.split
        self._is_last = self._global.micro_batches == split.accum_steps or not has_another()
        if self._is_last and self._global.micro_batches < split.accum_steps and self._scaling is not None:
            self._scaling.leave_out_step()
        self._global.add(batch)

    def step(self, chosen: Sequence[torch.optim.Optimizer], *, clip_norm: float | None, passes: float) -> int:
        """Step optimizers and clear their gradients, if the global batch is complete. Return its rows, or 0 if it is not complete.

        Args:
            chosen: these optimizers, and the batch goes on; without any: all that have not stepped yet, which ends the batch.
            passes: the number of passes trained so far, for learning rates that warm up.
        """
        batch = self.batch
        if batch is None:
            raise RunError(
                "call ctx.step() after ctx.backward(loss), for a batch of ctx.batches('train'). To step several times on one batch, name "
                "the optimizer: ctx.step(optimizer)."
            )
        if not self._went_backward and not self._skipped:
            # Ranks that called backward() wait for this rank's gradients. The error ends them, too.
            raise RunError(
                f"worker {self._rank} called ctx.step() for a batch without ctx.backward(loss). Every worker must call it for "
                "every batch, or ctx.skip(); a worker without samples gets a filler that weighs nothing."
            )
        self._check_optimizers()
        if chosen and (batch.split.accum_steps or self._scaling is not None):
            raise RunError(_one_by_one("steps its optimizers one by one", batch, self._scaling is not None))
        if not self._is_last:
            self._end_micro_batch(batch)
            return 0
        stepped = {id(optimizer) for done in self._done for optimizer in done.optimizers}
        rest = [optimizer for optimizer in self._state.optimizers if id(optimizer) not in stepped]
        useful = self._apply(_Step(tuple(chosen or rest), clip_norm), batch, passes)
        return batch.all_rows if chosen else self._end_batch(batch, useful)

    def settle(self, passes: float) -> int:
        """End a batch that the loop left: after optimizers that it stepped one by one or itself, after ``skip``, or if its own GradScaler
        left the step out. Return the rows of the global batch, 0 if it is not complete. Raises RunError if the loop did nothing with the
        batch."""
        batch = self.batch
        if batch is None:
            return 0
        overflowed = not (self._plain or self._done or self._skipped or self._went_backward) and self._overflowed(batch)
        if overflowed or (self._plain and not self._went_backward):
            self._begin_gradient(batch, lambda: False)
        if overflowed or self._plain or self._done:
            return self._end_batch(batch, float(batch.all_rows))
        if not self._skipped:
            self._check_prepared()
            self._check_optimizers()
            raise RunError(
                "the loop took the next batch without ctx.step(). Call ctx.backward(loss) and ctx.step() once for each batch "
                "of ctx.batches('train'), or ctx.skip(). To accumulate gradients over several batches, pass their total as batch_size: the "
                "Trainer accumulates where memory is too small for it. A GradScaler of the loop's own may have left the step out: drop it, "
                "and pass precision='fp16' to the Trainer, which scales losses itself."
            )
        if not self._is_last:
            self._end_micro_batch(batch)
            return 0
        useful = 0.0
        for step in self._usual or [_Step(tuple(self._state.optimizers), None)]:
            useful = self._apply(step, batch, passes)
        return self._end_batch(batch, useful)

    def _check_prepared(self) -> None:
        """Raise RunError if the run knows no model: no step would train the loop's, and no checkpoint would hold it."""
        if not self.joined.models:
            raise RunError(
                "ctx.prepare was not called, so that no step trains the model. Call model, optimizer = ctx.prepare(model, optimizer) "
                "before the loop, or ctx.skip() for each batch of a loop that trains nothing."
            )

    def _check_optimizers(self) -> None:
        """Raise RunError if a loss has reached a model and no optimizer is prepared: the model would silently stay as it is."""
        if self._state.optimizers:
            return
        if any(p.grad is not None for model in self.joined.models for p in model.parameters()):
            raise RunError(
                "ctx.prepare got no optimizer, so that no step trains the model. Pass it along: model, optimizer = ctx.prepare(model, "
                "optimizer)."
            )

    def _overflowed(self, batch: LocalBatch) -> bool:
        """Return whether ``loss.backward()`` has left gradients that are not finite, with which a GradScaler does not step. Only where all
        workers see the same gradients: the others would wait in the exchange before their step."""
        optimizers = self._state.optimizers
        if batch.split.accum_steps or self._scaling is not None or any(map(self.joined.exchanges_some, optimizers)):
            return False
        gradients = [p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        return not all(bool(torch.isfinite(gradient.to_dense()).all()) for gradient in gradients)

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped on the current batch."""
        return self.batch is not None and bool(self._plain or self._done)

    def _end_micro_batch(self, batch: LocalBatch) -> None:
        self._global.end_micro_batch(batch, self._state.optimizers)
        self.batch = None
        self._meter.micro_batch_done()
        if self._scaling is not None:
            self._scaling.micro_batch_done()

    def _apply(self, step: _Step, batch: LocalBatch, passes: float) -> float:
        """Finish the gradients of a step's optimizers, and step them. Return the worth of the global batch."""
        rows = self._global.rows
        useful = float(rows) if self._scaling is None else self._scaling.useful(rows)
        self._done.append(step)
        if self._finish_gradients(step, batch.split):
            self.stepping, self._in_plain = True, False
            with contextlib.nullcontext() if self._scaling is None else self._scaling.scaled_rates(rows, passes):
                self._optimizer_steps.step(step.optimizers)
            self.stepping = False
        return useful

    def _end_batch(self, batch: LocalBatch, useful: float) -> int:
        rows = self._global.rows
        if not self._skipped:
            self._usual = [*self._done, *self._plain] or self._usual
        self._optimizer_steps.end_batch()
        self._meter.stepped(useful / max(rows, 1))
        self._watchdog.alive()
        self._state.stepped([*self._global.trained, batch.positions], rows, useful)
        self._global, self.batch = GlobalBatch(), None
        return rows

    def _finish_gradients(self, step: _Step, split: BatchSplit) -> bool:
        """Exchange the gradients if no model did, unscale them, correct them for the real rows, measure and clip them. Return whether
        they hold anything."""
        optimizers = step.optimizers
        self.joined.exchange(optimizers, takes_part=self._global.takes_part)
        self._meter.backward_done()
        # By id: optimizers may share parameters.
        held = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        parameters = [p for p in held.values() if p.grad is not None]
        if self._global.kept <= 0 or not (self._global.takes_part or self.joined.anyone_takes_part()):
            for optimizer in optimizers:  # no rank's samples count
                optimizer.zero_grad(set_to_none=True)
            return False
        self._optimizer_steps.begin(optimizers)
        if self._global.kept != self._global.assumed:
            scale_gradients(parameters, self._global.assumed / self._global.kept)
        if self._scaling is not None:
            self._memory.after_batch(split.local_batch_size)
            self._scaling.end_step(self._state.progress.step, split, self._global.rows)
        if step.clip_norm is not None:
            clip_gradients(parameters, step.clip_norm)
        return True

    # -- steps that the loop makes itself --------------------------------------------------------------------------

    def _missing_weight(self) -> float:
        """The weight of gradients that ``loss.backward()`` made, which knows no weights."""
        return 1.0 if self.batch is None else self.batch.weight * self._workers / max(self.batch.all_weight, 1)

    def _before_plain_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        batch = self.batch
        if (self.stepping and not self._in_plain) or batch is None:
            return
        if batch.split.accum_steps or self._scaling is not None:
            raise RunError(_one_by_one("calls optimizer.step() itself", batch, self._scaling is not None))
        if self.joined.sharded and self._workers > 1:
            raise RunError(
                "the loop calls optimizer.step() itself, and its model is sharded. Call ctx.backward(loss) and ctx.step(): they weight "
                "unequal batches before the workers exchange gradients."
            )
        closed = any(callable(argument) for argument in (*arguments, *named.values()))
        if closed and self._workers > 1 and (needs_closure(optimizer) or self.joined.exchanges_some(optimizer)):
            name = type(optimizer).__name__
            raise RunError(
                f"the loop calls {name}.step(closure), and {self._workers} workers would step by different losses or gradients. Train on "
                "one worker, or use an optimizer without a closure, such as Adam, and call ctx.backward(loss) and ctx.step()."
            )
        if not closed and not self._went_backward and self.joined.missed(optimizer):
            raise RunError(
                "the loop's loss did not come from a call of the model that ctx.prepare returned, and DistributedDataParallel exchanges "
                "gradients only then. Call that model, or call ctx.backward(loss) and ctx.step(), or let the workers exchange gradients "
                "just before the step: ctx.prepare(model, optimizer, ddp=False)."
            )
        weight = 1.0 if self._went_backward else self._missing_weight()
        self.joined.exchange([optimizer], takes_part=True, weight=weight)
        self._meter.backward_done()
        self.stepping = self._in_plain = True

    def _after_plain_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if self._in_plain:
            self.stepping = self._in_plain = False
            self._plain.append(_Step((optimizer,), None))


def _one_by_one(does: str, batch: LocalBatch, adapts: bool) -> str:
    """The error of a loop whose steps do not suit its batches."""
    if adapts:
        return (
            f"the loop {does}, and its batch size adapts: a range needs one ctx.step() for all optimizers. Call ctx.backward(loss) and "
            "ctx.step(), or pass a fixed batch_size."
        )
    split = batch.split
    return (
        f"the loop {does}, and a global batch of {split.global_batch_size} accumulates {split.accum_steps + 1} micro-batches of "
        f"{split.local_batch_size} on each of {split.workers} workers. Call ctx.backward(loss) and ctx.step(), or pass a batch_size that "
        "needs no accumulation."
    )
