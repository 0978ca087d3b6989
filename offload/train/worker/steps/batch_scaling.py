"""Scale learning rates with the batch, measure gradient noise, and count progress: the worker's side of adaptive batches.

The ranks agree on the gradient noise, and count progress in samples of initial batches.

Every rank computes the same values from the same messages. Where it stops: the driver chooses the next batch
(:mod:`offload.adapt.decide`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.adapt.noise_average import NoiseAverage
from offload.adapt.rules import Rule, learning_rate_factor
from offload.errors import RunError
from offload.model.batch_split import BatchSplit
from offload.train.config import Adaptation, BatchSize
from offload.train.worker.links.agreement import Mailbox, NoiseMeasurement, NoisePart
from offload.train.worker.steps.gradient_noise import NoiseMeter, is_adam, moments_of


class BatchScaling:
    """One rank's knowledge of its gradients, in a run with a range of batch sizes.

    Args:
        batch_size: the range of batch sizes.
        adaptation: the rules.
        workers: the number of ranks.
    """

    def __init__(self, batch_size: BatchSize, adaptation: Adaptation, *, workers: int) -> None:
        self.noise = NoiseAverage(batch_size=batch_size.initial)
        self.mail = Mailbox(0)
        self._initial, self._adaptation = batch_size.initial, adaptation
        self._workers = workers
        self._meter: NoiseMeter | None = None
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._newest = -1

    def adopt(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Measure the gradients of these optimizers, and scale their learning rates with the batch. Raises RunError for one without a
        learning rate, such as one that finds its steps itself, unless the user's rule leaves rates alone."""
        for optimizer in optimizers:
            if self._rule(optimizer) != "none" and any(group.get("lr") is None for group in optimizer.param_groups):
                raise RunError(
                    f"the batch size adapts, and learning rates with it, but {type(optimizer).__name__} has a parameter group without a "
                    'learning rate ("lr"). Give it one, or leave rates alone: adaptation=offload.Adaptation(learning_rate="none").'
                )
        self._optimizers = optimizers
        self._meter = NoiseMeter(optimizers, self._workers)
        self.mail = Mailbox(self._meter.width)

    def begin_step(self, step: int, split: BatchSplit, scaler: torch.amp.GradScaler | None) -> None:
        """Prepare for the first backward pass of a global batch."""
        if self._meter is not None:
            scale = scaler.get_scale if scaler is not None else lambda: 1.0
            self._meter.begin(step, split.accum_steps + 1, scale)

    def micro_batch_done(self) -> None:
        """Note that the global batch goes on with another micro-batch."""
        if self._meter is not None:
            self._meter.micro_batch_done()

    def leave_out_step(self) -> None:
        """Measure this global batch no further: the pass ends within it, and it is smaller than others."""
        if self._meter is not None:
            self._meter.leave_out()

    def end_step(self, step: int, split: BatchSplit, rows: int) -> None:
        """Finish the measurement after the last backward pass of a global batch of ``rows`` samples, with gradients unscaled and not
        clipped."""
        if self._meter is None:
            return
        whole = rows == split.global_batch_size
        part = self._meter.finish(step, local_batch_size=split.local_batch_size, whole=whole)
        if part is not None:
            self.mail.post(step, part)

    def add(self, measured: Sequence[NoiseMeasurement]) -> None:
        """Add complete measurements to the average."""
        for measurement in measured:
            first: NoisePart = measurement.parts[0]
            sqr, var = moments_of(measurement.parts, self._initial)
            # The two gradients of a pair belong to two steps; otherwise, all of them make up one.
            samples = first.samples_each * (1 if first.paired else first.count)
            steps = measurement.step - self._newest if self._newest >= 0 else 1
            self.noise = self.noise.updated(
                sqr, var, scale=max(samples / self._initial, 1.0), steps=max(steps, 1), paired=first.paired
            )
            self._newest = measurement.step

    def useful(self, rows: int) -> float:
        """The worth of a global batch of ``rows`` samples, in samples of initial batches."""
        noise = self.noise.whole
        if noise is None or rows <= self._initial:
            return float(rows)
        # One step of a large batch replaces as many steps of the initial batch as its gain.
        return min(float(noise.gain(rows)) * self._initial, float(rows))

    @contextmanager
    def scaled_rates(self, rows: int, passes: float) -> Iterator[None]:
        """A context with the learning rates for a global batch of ``rows`` samples."""
        groups = [(o, g) for o in self._optimizers for g in o.param_groups]
        noises = self.noise.groups
        size, before = max(rows, self._initial), list[tuple[dict[str, Any], Any]]()
        for number, (optimizer, group) in enumerate(groups):
            rule = self._rule(optimizer)
            if rule == "none":  # the group may have no rate
                continue
            gain = float(noises[number].gain(size)) if number < len(noises) else 1.0
            factor = learning_rate_factor(
                rule,
                scale=size / self._initial,
                gain=gain,
                passes=passes,
                warmup_epochs=self._adaptation.warmup_epochs,
            )
            before.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in before:
                group["lr"] = rate

    def _rule(self, optimizer: torch.optim.Optimizer) -> Rule:
        rule = self._adaptation.learning_rate
        if rule != "auto":
            return rule
        return "adascale-sqrt" if is_adam(optimizer) else "adascale"

    def to_state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return self.noise.to_state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`to_state`."""
        self.noise = NoiseAverage.from_state(state, self._initial)
