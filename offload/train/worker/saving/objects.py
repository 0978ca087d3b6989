"""The objects whose state goes into checkpoints: trained models, optimizers, and what else ``ctx.prepare`` got."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.train.checkpoints.format import Training
from offload.train.checkpoints.plain import to_plain
from offload.train.checkpoints.sharded import divided, is_part, is_sharded, load_model, load_optimizer, whole
from offload.train.worker.saving.kept_options import KeptOptions

REMEDY_PLAIN = "Make its state_dict() return such data, or do not pass it to ctx.prepare."

TensorMap = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ObjectStates:
    """The states of all objects as plain data. ``loose``: the parameters that only an optimizer holds."""

    model: dict[str, Any]
    optimizers: list[Any]
    others: list[Any]
    loose: list[torch.Tensor]
    scaler: dict[str, Any] | None


class TrainedObjects:
    """The objects of one worker.

    Attributes:
        models: the trained models, on their device.
        optimizers: their optimizers.
        scaler: the gradient scaler, for fp16.
        sharded: whether any tensor is divided among the ranks, so that all of them must gather it.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaler = scaler
        self.sharded = False
        self._others: list[Any] = []

    def adopt(self, models: Sequence[torch.nn.Module], others: Sequence[Any]) -> None:
        """Take charge of trained models on their device, and of the objects that belong to them."""
        self.models = list(models)
        self.optimizers = [item for item in others if isinstance(item, torch.optim.Optimizer)]
        self._others = [item for item in others if not isinstance(item, torch.optim.Optimizer)]
        for optimizer in self.optimizers:
            # Adagrad makes its state at once, and a script may have read one: it lies where the model was then. Loading moves it.
            if any(map(_is_elsewhere, optimizer.state, optimizer.state.values())):
                optimizer.load_state_dict(optimizer.state_dict())
        self.sharded = any(map(is_sharded, (*self.models, *self._others))) or any(map(is_part, self._loose()))

    def states(self, tensor: TensorMap) -> ObjectStates:
        """The states, with ``tensor`` applied to each tensor. Raises NotPlainError for a state that no checkpoint can hold."""
        states = [to_plain(model.state_dict(), "the model's state_dict()", tensor) for model in self.models]
        return ObjectStates(
            model=states[0] if len(states) == 1 else {str(i): state for i, state in enumerate(states)},
            optimizers=[_state_of(optimizer, tensor) for optimizer in self.optimizers],
            others=[_state_of(item, tensor) for item in self._others],
            loose=to_plain(self._loose(), "a parameter that only an optimizer holds", tensor),
            scaler=_state_of(self.scaler, tensor) if self.scaler is not None else None,
        )

    def restore(self, model: Mapping[str, Any], stored: Training, *, keeps_options: bool = False) -> None:
        """Load the states of a checkpoint: that of the model, or of several by number, and those in ``stored``. ``keeps_options``: whether
        optimizers keep their options; see :mod:`offload.train.worker.saving.kept_options`.

        Raises whatever a ``load_state_dict`` raises, and ValueError if the objects are others than those of the checkpoint.
        """
        several = bool(model) and all(name.isdigit() and isinstance(state, Mapping) for name, state in model.items())
        _check_count("trained models", len(model) if several else 1, len(self.models))
        _check_count("optimizers", len(stored.optimizers), len(self.optimizers))
        _check_count("other objects", len(stored.others), len(self._others))
        kept = KeptOptions(self.optimizers, self._others) if keeps_options else None
        for i, trained in enumerate(self.models):
            load_model(trained, model[str(i)] if several else model)
        for optimizer, state in zip(self.optimizers, stored.optimizers, strict=True):
            load_optimizer(optimizer, state)
        for parameter, value in zip(self._loose(), stored.loose, strict=bool(stored.loose)):
            if value.shape != parameter.shape:
                raise ValueError(f"a parameter has the shape {tuple(parameter.shape)}, not {tuple(value.shape)}.")
            parameter.data.copy_(divided(value, parameter) if is_part(parameter) else value)
        for item, state in zip(self._others, stored.others, strict=True):
            if isinstance(item, torch.nn.Module):
                load_model(item, state)
            else:
                item.load_state_dict(state)
        if self.scaler is not None and stored.scaler is not None:
            self.scaler.load_state_dict(dict(stored.scaler))
        if kept is not None:
            kept.apply()

    def _loose(self) -> list[torch.Tensor]:
        """The parameters that only an optimizer holds, such as a temperature, or the weights of a loss that is not prepared."""
        modules = [item for item in (*self.models, *self._others) if isinstance(item, torch.nn.Module)]
        known = {id(p) for module in modules for p in module.parameters()}
        held = {id(p): p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        return [parameter for number, parameter in held.items() if number not in known]


def gathered(tensor: torch.Tensor, keep: TensorMap, writes: bool) -> torch.Tensor:
    """A tensor for the checkpoint: a sharded one whole, on the CPU, since a device may not hold the whole model. Nothing on ranks that do
    not write."""
    if is_part(tensor):
        tensor, keep = whole(tensor), copied
    return keep(tensor) if writes else torch.empty(0, dtype=tensor.dtype)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU, which training does not change."""
    return tensor.detach().to("cpu", copy=True)


def _is_elsewhere(parameter: Any, state: Any) -> bool:
    """Return whether a parameter's optimizer state lies on another device. Its number of steps may: torch keeps that on the CPU."""
    if not (
        isinstance(parameter, torch.Tensor) and isinstance(state, Mapping)
    ):  # a user's own optimizer may hold anything
        return False
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return any(tensor.device != parameter.device for tensor in tensors)


def _check_count(what: str, stored: int, prepared: int) -> None:
    """Raise ValueError if the script has prepared more or fewer objects of a kind than the checkpoint holds."""
    if stored != prepared:
        raise ValueError(f"the number of {what} is {stored} in the checkpoint, and {prepared} in ctx.prepare")


def _state_of(item: Any, tensor: TensorMap) -> Any:
    return to_plain(item.state_dict(), f"the state_dict() of {type(item).__name__}", tensor)
