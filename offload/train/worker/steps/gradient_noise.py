"""Measure gradient noise in a worker while it trains: the differences between the gradients of a step's parts.

If a step has several parts (workers, accumulated micro-batches), the meter compares their gradients. It compares a single part with
the step before. For optimizers that precondition their gradient (the Adam family), it compares preconditioned gradients. A
measurement costs a norm per parameter and part, so it measures only some steps. Several losses of a micro-batch add up before their norm
is taken, which costs the memory of one more gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.model.noise import gradient_moments
from offload.train.worker.links.agreement import NoisePart

EVERY = 8  # the meter measures one step in EVERY
EAGER = 32  # the meter measures each of the first EAGER steps, for an early estimate
ADAM_FAMILY = ("adam", "lamb", "adopt")


def moments_of(parts: Sequence[NoisePart], batch_size: int) -> tuple[list[float], list[float]]:
    """``(|G|², tr(Σ))`` by parameter group at the initial batch, from every rank's part. All ranks use rank 0's norm of the mean
    gradient: if ranks differed in its last bit, their steps would differ."""
    first = parts[0]
    sqr, var = [], []
    for group, total in enumerate(first.total):
        mean_square = sum(part.squares[group] for part in parts) / first.count
        s, v = gradient_moments(mean_square, total, first.count, first.samples_each, batch_size)
        sqr.append(s)
        var.append(v)
    return sqr, var


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is of the Adam family, which preconditions steps by the gradient's second moment."""
    return any(name in type(optimizer).__name__.lower() for name in ADAM_FAMILY)


class NoiseMeter:
    """The meter of one rank. Call, for each global batch, :meth:`begin`, the backward passes with :meth:`micro_batch_done` between two
    micro-batches, and :meth:`finish` before the optimizers step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], world_size: int) -> None:
        self._groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        # A group may have no parameters, such as that of the biases in a model without any.
        self._device = next((p.device for _, group in self._groups for p in group["params"]), torch.device("cpu"))
        self._world_size = world_size
        self._handles: list[Any] = []
        self._norms: list[list[torch.Tensor]] = [[] for _ in self._groups]
        self._reached: dict[
            torch.Tensor, torch.Tensor | None
        ] = {}  # in this micro-batch: gradients, if several losses add up
        self._several = False  # the loop runs several backward passes for a micro-batch
        self._adds_up = False  # the meter keeps gradients, so that it can add up those of several losses
        self._before: tuple[int, list[list[torch.Tensor]]] | None = None
        self._micro_batches = 0
        self._loss_scale = 1.0

    @property
    def width(self) -> int:
        """The number of numbers in the message of a :class:`NoisePart`."""
        return 3 + 2 * len(self._groups)

    def begin(self, step: int, micro_batches: int, loss_scale: Callable[[], float]) -> None:
        """Prepare for the first backward pass of step ``step``, with ``micro_batches`` on each rank. ``loss_scale``: the factor by
        which fp16 multiplied the losses."""
        self._forget()
        self._micro_batches = micro_batches
        if not _measured(step) or self._world_size * micro_batches < 2:
            return
        self._loss_scale = loss_scale()
        for number, (optimizer, group) in enumerate(self._groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(self._noting(number, optimizer, group, parameter)))

    def _noting(
        self, number: int, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            if self._adds_up:
                before = self._reached.get(parameter)
                # A copy, since autograd may add to the tensor later.
                self._reached[parameter] = gradient.detach().clone() if before is None else before + gradient.detach()
            elif parameter in self._reached:
                self._several = True
            else:
                self._reached[parameter] = None
                self._norms[number].append(_norm(gradient.detach(), optimizer, group, parameter))

        return note

    def micro_batch_done(self) -> None:
        """Note the end of a micro-batch's backward passes."""
        if self._adds_up:
            for number, (optimizer, group) in enumerate(self._groups):
                for parameter in group["params"]:
                    if (gradient := self._reached.get(parameter)) is not None:
                        self._norms[number].append(_norm(gradient, optimizer, group, parameter))
        self._reached = {}

    def leave_out(self) -> None:
        """Measure this step no further. What completes its gradients is then no other loss of the micro-batch."""
        self._forget()

    def _forget(self) -> tuple[bool, list[list[torch.Tensor]]]:
        """End the measurement of a global batch. Return whether there was one, and its norms."""
        for handle in self._handles:
            handle.remove()
        hooked, self._handles = bool(self._handles), []
        norms, self._norms = self._norms, [[] for _ in self._groups]
        self._reached = {}
        return hooked, norms

    def finish(self, step: int, *, local_batch_size: int, whole: bool) -> NoisePart | None:
        """Return the measurement of the step whose mean gradient the parameters hold, unscaled and not clipped; None if there is
        none. ``whole``: whether all its local batches were full, on all ranks."""
        self.micro_batch_done()
        hooked, norms = self._forget()
        if self._world_size * self._micro_batches == 1:
            return self._pair(step, local_batch_size, whole=whole)
        if self._several and not self._adds_up:
            self._adds_up = True  # from the next step on: this one's norms are those of single losses
            return None
        # A batch that is not full has another variance, which would bias the mean.
        if not hooked or not whole:
            return None
        # Each micro-batch's loss was divided by the number of micro-batches, and multiplied by fp16's scale.
        undo = (self._micro_batches / self._loss_scale) ** 2
        squares = [undo * self._sum_of_squares(of_group) for of_group in norms]
        total = [
            self._sum_of_squares([_norm(p.grad, o, g, p) for p in g["params"] if p.grad is not None])
            for o, g in self._groups
        ]
        values = torch.stack([*squares, *total]).tolist()
        return NoisePart(
            count=self._world_size * self._micro_batches,
            samples_each=local_batch_size,
            paired=False,
            squares=tuple(values[: len(squares)]),
            total=tuple(values[len(squares) :]),
        )

    def _pair(self, step: int, local_batch_size: int, *, whole: bool) -> NoisePart | None:
        """Compare this step's gradient with the previous step's."""
        before, self._before = self._before, None
        if not whole:
            return None
        part = None
        if before is not None and before[0] == step - 1:
            part = self._compared(before[1], local_batch_size)
        # Kept only for a comparison: a copy of all gradients takes as much memory as the model.
        if _measured(step + 1):
            self._before = step, [[_grad(p).clone() for p in g["params"]] for _, g in self._groups]
        return part

    def _compared(self, before: list[list[torch.Tensor]], local_batch_size: int) -> NoisePart | None:
        squares, total = [], []
        for (optimizer, group), old in zip(self._groups, before, strict=True):
            pairs = [(p, _grad(p), o) for p, o in zip(group["params"], old, strict=True)]
            if any(new.shape != was.shape for _, new, was in pairs):
                return None  # a parameter has just gained or lost its gradient
            norms = [_norm(g, optimizer, group, p) for p, new, was in pairs for g in (new, was)]
            squares.append(self._sum_of_squares(norms))
            means = [_norm((new + was) / 2, optimizer, group, p) for p, new, was in pairs]
            total.append(self._sum_of_squares(means))
        values = torch.stack([*squares, *total]).tolist()
        return NoisePart(
            count=2,
            samples_each=local_batch_size,
            paired=True,
            squares=tuple(values[: len(squares)]),
            total=tuple(values[len(squares) :]),
        )

    def _sum_of_squares(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        if not norms:
            return torch.zeros((), device=self._device)
        return torch.stack(list(norms)).square().sum()


def _measured(step: int) -> bool:
    return step < EAGER or step % EVERY == 0


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_empty(0) if parameter.grad is None else parameter.grad


def _norm(
    gradient: torch.Tensor, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> torch.Tensor:
    """The norm of a gradient, preconditioned if the optimizer preconditions it."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    elif is_adam(optimizer):
        state = optimizer.state.get(parameter, {})
        if "exp_avg_sq" in state and gradient.numel():
            # Adam's own denominator: sqrt(v / (1 - β₂ᵗ)) + ε, with the average v of squared gradients corrected for its start at 0.
            correction = 1 - group["betas"][1] ** float(state.get("step", 1))
            gradient = _real(gradient) / ((_real(state["exp_avg_sq"]) / max(correction, 1e-12)).sqrt() + group["eps"])
    gradient = _real(gradient)
    # Torch refuses a dtype that is narrower than the gradient's.
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return norm.float()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts, as torch's optimizers take it; another one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
