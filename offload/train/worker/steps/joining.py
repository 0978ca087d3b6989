"""Join the models of all workers: their gradients become the mean over the ranks.

One trained model is joined by DistributedDataParallel, which exchanges gradients while backward runs. Several models, or loops that
DistributedDataParallel does not allow, exchange them just before a step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offload.errors import ConfigError
from offload.model.checks import shown

BUCKET_BYTES = 25 << 20  # as large as DistributedDataParallel's


class Join(Protocol):
    """Joins models with those of the other workers."""

    def wrap(
        self,
        model: torch.nn.Module,
        *,
        ready: Callable[[], None],
        weight: Callable[[], float],
        options: Mapping[str, Any],
    ) -> torch.nn.Module:
        """Return the model, joined by DistributedDataParallel with these options.

        It calls ``ready`` for each bucket of ready gradients, and multiplies these by ``weight()`` before it adds them up.
        """

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace gradients by their means over the ranks. All ranks must call it with the same shapes."""


class Distributed:
    """Joins models through torch.distributed's default group."""

    def wrap(
        self,
        model: torch.nn.Module,
        *,
        ready: Callable[[], None],
        weight: Callable[[], float],
        options: Mapping[str, Any],
    ) -> torch.nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            allreduce_hook,  # a slow import, seldom needed
        )

        def all_reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            ready()
            if (factor := weight()) == 0.0:  # 0 * inf is not 0
                bucket.buffer().zero_()
            elif factor != 1.0:
                bucket.buffer().mul_(factor)
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the world's group

        device = next(model.parameters()).device
        # Buffers are not broadcast before every forward pass: the ranks' own statistics serve training as well, and validation may
        # then run unequal numbers of batches. Validation makes them equal when it starts.
        arguments = {"device_ids": [device] if device.type == "cuda" else None, "broadcast_buffers": False, **options}
        with warnings.catch_warnings():
            # The option's successor sends buffers at the start, and gloo cannot send those of every type.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            joined = DistributedDataParallel(model, **arguments)
        joined.register_comm_hook(
            None, lambda state, bucket: all_reduce(bucket)
        )  # a lambda, since DDP checks annotations
        return joined

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        for bucket in _buckets(gradients):
            # Gradients of sparse embeddings travel dense, since their rows differ by rank.
            flat = torch.cat([gradient.to_dense().reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, mean in zip(
                bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True
            ):
                mean = mean.view(gradient.shape)
                # In place: the parameters hold these tensors.
                gradient.copy_(mean.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else mean)


def _buckets(gradients: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The gradients in groups of one type and of about :data:`BUCKET_BYTES`."""
    # Few large messages: each costs a round trip, whatever its size.
    buckets: list[list[torch.Tensor]] = []
    room: dict[torch.dtype, int] = {}
    last: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if room.get(gradient.dtype, 0) <= 0:
            last[gradient.dtype] = []
            buckets.append(last[gradient.dtype])
            room[gradient.dtype] = BUCKET_BYTES
        last[gradient.dtype].append(gradient)
        room[gradient.dtype] -= gradient.numel() * gradient.element_size()
    return buckets


def check_ddp(ddp: Any) -> dict[str, Any] | None:
    """The value of ``ctx.prepare(ddp=...)``: options of DistributedDataParallel, or None for False. Raises ConfigError for others."""
    sane = "a dict of arguments of DistributedDataParallel, such as {'find_unused_parameters': True}, or False"
    if ddp is None or ddp is True:
        return {}
    if ddp is False:
        return None
    if not isinstance(ddp, Mapping):
        raise ConfigError(f"ctx.prepare(ddp=...) takes {sane}, found {shown(ddp)}.")
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {
        "self",
        "module",
        "device_ids",
        "output_device",
    }
    unknown = sorted(map(str, set(ddp) - known))
    if unknown:
        raise ConfigError(f"ctx.prepare(ddp=...) takes {sane}, found {', '.join(unknown)}.")
    return dict(ddp)


class _Zero(torch.nn.Module):
    """A forward pass that reaches every parameter, and whose gradients are zero."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._zero = [p for p in parameters if p.requires_grad]

    def forward(self) -> torch.Tensor:
        return torch.stack([(p.reshape(-1)[:1] * 0).sum().float() for p in self._zero]).sum()


def zero_loss(model: DistributedDataParallel) -> torch.Tensor:
    """A loss whose gradients are zero. Its backward takes part in the exchange of gradients, whatever forward passes ran before."""
    module = model.module
    model.module = _Zero(module.parameters())
    try:
        loss: torch.Tensor = model()
        return loss
    finally:
        model.module = module
