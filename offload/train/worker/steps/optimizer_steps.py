"""Step optimizers. For fp16, unscale their gradients first, and update the loss's scale once for each batch.

Losses of one batch have one scale, even if its optimizers step one after the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from offload.errors import RunError
from offload.train.worker.steps.gradients import scale_gradients


class Trained(Protocol):
    """What trains: all optimizers, and fp16's scaler, if there is one."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...


class OptimizerSteps:
    """The steps of one rank's optimizers. Call :meth:`begin` and :meth:`step` for each step, and :meth:`end_batch` at the end of a
    global batch."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._stepped: list[torch.optim.Optimizer] = []  # since the scaler's last update

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Divide the optimizers' gradients by the scale of the losses. Raises RunError for an optimizer that needs a closure."""
        for optimizer in optimizers:
            if needs_closure(optimizer):
                name = type(optimizer).__name__
                raise RunError(
                    f"ctx.step() cannot step {name}: it needs a closure that computes the loss again. Call {name}.step(closure) in a "
                    "run of one worker, or use an optimizer without a closure, such as Adam."
                )
        scaler = self._trained.scaler
        if scaler is None:
            return
        if any(optimizer is stepped for optimizer in optimizers for stepped in self._stepped):
            self._update_early(scaler)
        unscaled: set[int] = set()
        for optimizer in optimizers:
            if reached := _reached(optimizer):
                scaler.unscale_(optimizer)
                if shared := [p for p in reached if id(p) in unscaled]:  # an optimizer before has unscaled them, too
                    scale_gradients(shared, scaler.get_scale())
                unscaled.update(map(id, reached))

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step optimizers whose gradients are unscaled, and clear these."""
        for optimizer in optimizers:
            if self._trained.scaler is None:
                optimizer.step()
            elif _reached(optimizer):  # the scaler refuses one without gradients
                self._trained.scaler.step(optimizer)
                self._stepped.append(optimizer)
        # Two optimizers may hold the same parameter: clear gradients only once all have stepped.
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def end_batch(self) -> None:
        """Update the scale of the losses."""
        if self._stepped and self._trained.scaler is not None:
            self._trained.scaler.update()
        self._stepped = []

    def _update_early(self, scaler: torch.amp.GradScaler) -> None:
        """Update the scale within a batch: the scaler takes one step of an optimizer for each update. Gradients that wait for their step
        get the new scale, too."""
        before = scaler.get_scale()
        self.end_batch()
        if (factor := scaler.get_scale() / before) != 1.0:
            # By id: two optimizers may hold the same parameter.
            held = {id(p): p for optimizer in self._trained.optimizers for p in _reached(optimizer)}
            scale_gradients(list(held.values()), factor)


def _reached(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer cannot step without a closure, such as LBFGS."""
    return _requires_closure(type(optimizer).step)


@functools.cache  # reading a signature takes as long as a small optimizer's step
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
