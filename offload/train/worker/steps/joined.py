"""The trained models of one rank, joined with those of the other ranks: after an exchange, gradients are the mean over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from offload.errors import RunError
from offload.measure.steps import StepMeter
from offload.train.checkpoints.sharded import is_part, is_sharded
from offload.train.worker.steps.gradients import scale_gradients
from offload.train.worker.steps.joining import Join, zero_loss


class JoinedModels:
    """DistributedDataParallel exchanges the gradients of a single model while backward runs, and ``fully_shard`` those of sharded
    parameters. :meth:`exchange` exchanges all others just before a step. They include parameters that were frozen when the models were
    joined, which DistributedDataParallel leaves out.

    Attributes:
        models: the models, joined.
        sharded: whether any of them is sharded.
    """

    def __init__(self, join: Join, meter: StepMeter, *, workers: int) -> None:
        self.models: list[torch.nn.Module] = []
        self.sharded = False
        self._join, self._meter, self._workers = join, meter, workers
        self._by_ddp: set[int] = set()  # the ids of parameters that :meth:`exchange` leaves to DistributedDataParallel
        self._went_forward = self._in_backward = False
        self._share: torch.Tensor | None = None  # the share of ranks that take part in this global batch

    def adopt(
        self, models: Sequence[torch.nn.Module], options: Mapping[str, Any] | None, weight: Callable[[], float]
    ) -> list[torch.nn.Module]:
        """Join these models, and return them.

        Args:
            models: the trained models.
            options: arguments of DistributedDataParallel; None: exchange gradients before steps.
            weight: returns the factor of gradients that the loop's own ``loss.backward()`` makes, which knows no weights.
        """
        self.models = list(models)
        self.sharded = any(map(is_sharded, models))
        if self.sharded and options:
            raise RunError(
                "ctx.prepare(ddp=...) got arguments of DistributedDataParallel, and a model that fully_shard has sharded does not use it. "
                "Leave them out."
            )
        trained = [model for model in models if any(p.requires_grad for p in model.parameters())]
        if self._workers == 1 or not trained:
            return self.models
        if len(trained) > 1 or options is None or self.sharded:
            return self.models
        # Torch's name for the parameters that the user wants no exchange of.
        ignored = getattr(trained[0], "_ddp_params_and_buffers_to_ignore", ())
        self._by_ddp = {id(p) for name, p in trained[0].named_parameters() if p.requires_grad or name in ignored}
        joined = self._join.wrap(
            trained[0],
            ready=self._meter.last_gradient,
            weight=lambda: 1.0 if self._in_backward else weight(),
            options=options,
        )
        if isinstance(joined, DistributedDataParallel):
            joined.register_forward_pre_hook(self._note_forward)
        self.models = [joined if model is trained[0] else model for model in models]
        return self.models

    def _note_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._went_forward = self._went_forward or torch.is_grad_enabled()

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        return next((model for model in self.models if isinstance(model, DistributedDataParallel)), None)

    def begin_global_batch(self) -> None:
        """Note that the loop takes the first micro-batch of a global batch."""
        self._share = None

    def begin_batch(self, *, exchanges: bool) -> None:
        """Note that the loop takes a batch. ``exchanges``: whether its gradients complete the step's, unless the pass ends before."""
        self._went_forward = False
        if (ddp := self._ddp) is not None:
            ddp.require_backward_grad_sync = exchanges  # DDP looks at it in its forward pass, not in backward

    def check_forward(self) -> None:
        """Raise RunError if another backward pass would need another forward pass."""
        if self._ddp is not None and not self._went_forward:
            raise RunError(
                "ctx.backward(loss) was called twice after one forward pass. Add the losses up first: ctx.backward(loss + other). Or let "
                "the workers exchange gradients just before the step: ctx.prepare(model, optimizer, ddp=False)."
            )

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, exchanges: bool) -> None:
        """Add a loss's gradients. ``exchanges``: whether they complete the step's."""
        self._in_backward = True
        try:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            if exchanges:
                self._exchange_missed()
        finally:
            self._went_forward = self._in_backward = False

    def _exchange_missed(self) -> None:
        """Let DistributedDataParallel exchange the gradients of a backward pass in which it did not: its own forward pass did not run, as
        with ``model.module.loss(batch)``, or ran when the pass seemed to go on with another micro-batch."""
        ddp = self._ddp
        if ddp is None or (self._went_forward and ddp.require_backward_grad_sync):
            return
        # Without a forward pass, the loss may not reach the model at all.
        if self._went_forward or any(p.grad is not None for p in ddp.parameters()):
            ddp.require_backward_grad_sync = True
            zero_loss(ddp).backward()  # type: ignore[no-untyped-call]

    def missed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether DistributedDataParallel left gradients of this optimizer alone, since its forward pass did not run in this
        batch."""
        if self._ddp is None or self._went_forward:
            return False
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return any(p.grad is not None and id(p) in self._by_ddp for p in held)

    def add_nothing(self, scaler: torch.amp.GradScaler | None, *, exchanges: bool) -> None:
        """Take part in an exchange during backward with gradients of zero."""
        if (ddp := self._ddp) is not None:
            zero = zero_loss(ddp)
            self.backward(zero if scaler is None else scaler.scale(zero), exchanges=exchanges)

    def exchange(self, optimizers: Sequence[torch.optim.Optimizer], *, takes_part: bool, weight: float = 1.0) -> None:
        """Replace gradients that no backward pass exchanged by their means over the ranks, after multiplying them by ``weight``.
        ``takes_part``: whether samples of this rank count in the global batch."""
        if self._workers == 1:
            return
        held = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        parameters = [p for p in held.values() if self._exchanges(p)]
        # 1 for each parameter with a gradient. It is made on the device: a copy from the host would wait for the backward pass.
        present = torch.ones(len(parameters), dtype=torch.float32, device=parameters[0].device if parameters else None)
        missing = [number for number, p in enumerate(parameters) if p.grad is None]  # on this rank
        for number in missing:
            parameters[number].grad = torch.zeros_like(parameters[number])
            present[number].zero_()
        if weight != 1.0:
            scale_gradients(parameters, weight)
        averaged = [p.grad for p in parameters if p.grad is not None]
        if parameters:
            averaged.append(present)
        if self._share is None and held:  # exchanged once for all steps of a global batch
            self._share = torch.full((1,), float(takes_part), device=next(iter(held.values())).device)
            averaged.append(self._share)
        if not self._by_ddp:
            self._meter.last_gradient()
        if averaged:
            self._join.average(averaged)
        if missing:
            shares = present.tolist()
            for number in missing:
                # No rank has its gradient. As on one worker, weight decay and momentum must not move it.
                if not shares[number]:
                    parameters[number].grad = None

    def exchanges_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether :meth:`exchange` must run between the backward pass and this optimizer's step."""
        return self._workers > 1 and any(self._exchanges(p) for g in optimizer.param_groups for p in g["params"])

    def _exchanges(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and not is_part(parameter) and id(parameter) not in self._by_ddp

    def anyone_takes_part(self) -> bool:
        """Return whether samples of any rank count in the global batch, after its first exchange. It waits for the device."""
        return self._share is None or bool(self._share > 0)
