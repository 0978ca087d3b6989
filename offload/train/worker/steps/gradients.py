"""Scale and clip gradients, of sharded parameters too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offload.train.checkpoints.sharded import is_part, whole


def scale_gradients(parameters: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply the gradients of parameters. A factor of 0 makes them 0, whatever they are."""
    for kind in _kinds(parameters):
        gradients = [p.grad for p in kind if p.grad is not None]
        if factor:
            torch._foreach_mul_(gradients, factor)
        else:  # 0 * inf is not 0
            torch._foreach_zero_(gradients)


def clip_gradients(parameters: Sequence[torch.Tensor], most: float) -> None:
    """Scale gradients down to a norm of at most ``most`` over all of them. All workers must call it if some are sharded."""
    kinds = _kinds(parameters)
    if not kinds:
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    # The norm of all gradients is that of the norms of their parts.
    norm = torch.linalg.vector_norm(torch.stack([whole(part) for part in norms]))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, most, norm)


def _kinds(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Sharded parameters and others, apart: torch's functions for many tensors take either."""
    kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for parameter in parameters:
        kinds[is_part(parameter)].append(parameter)
    return [kind for kind in kinds if kind]
