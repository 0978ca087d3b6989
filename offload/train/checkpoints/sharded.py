"""Parameters that ``fully_shard`` (FSDP2) divides among the workers.

Each worker holds a part of every sharded parameter, gradient and optimizer state, as a DTensor. Checkpoints hold whole tensors, so that
any number of workers resumes from them, sharded or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch


def is_part(tensor: Any) -> bool:
    """Return whether a tensor is one worker's part of a sharded one."""
    # By name: importing DTensor takes most of a second.
    return isinstance(tensor, torch.Tensor) and type(tensor).__name__ == "DTensor"


def is_sharded(item: Any) -> bool:
    """Return whether an object is a model with sharded parameters."""
    return isinstance(item, torch.nn.Module) and any(map(is_part, item.parameters()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor; return any other unchanged. A collective operation: all workers must call it, in the same order."""
    return cast("Any", tensor.detach()).full_tensor() if is_part(tensor) else tensor


def divided(value: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor as this worker's part, divided as ``like`` is."""
    from torch.distributed.tensor import distribute_tensor

    # Every worker has read the whole tensor, so no rank needs to send its copy (src_data_rank=None).
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a model's state of whole tensors."""
    if is_sharded(model):
        own, metadata = model.state_dict(), getattr(state, "_metadata", None)
        state = OrderedDict(
            (name, divided(value, own[name]) if is_part(own.get(name)) else value) for name, value in state.items()
        )
        if metadata is not None:  # the versions of its modules
            state._metadata = metadata  # type: ignore[attr-defined]
    model.load_state_dict(state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state of whole tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(is_part, parameters)):
        moments = {
            i: {name: _divided_with(parameters[i], entry) for name, entry in moment.items()}
            for i, moment in state["state"].items()
        }
        state = {**state, "state": moments}
    optimizer.load_state_dict(dict(state))


def _divided_with(parameter: torch.Tensor, moment: Any) -> Any:
    """An entry of a parameter's optimizer state, divided as the parameter is if both have the same shape. Others, such as Adam's
    step count, stay whole."""
    fits = isinstance(moment, torch.Tensor) and is_part(parameter) and moment.shape == parameter.shape
    return divided(moment, parameter) if fits else moment
