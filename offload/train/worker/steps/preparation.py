"""What the user's code passes to ``ctx.prepare``: trained models are joined with the other ranks', and all objects restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from offload.errors import RunError
from offload.train.checkpoints.sharded import is_part, is_sharded
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.steps.batch_scaling import BatchScaling
from offload.train.worker.steps.stepping import Stepper


class Preparation:
    """Prepares models and optimizers on one rank.

    Args:
        state: takes charge of all objects, and restores them.
        stepper: joins the trained models.
        scaling: measures the gradients of the optimizers' parameters; None if batches are fixed.
        share: copies rank 0's values of tensors to all ranks.
        device: the device of the models.
        rank, workers: this rank, and the number of ranks.
        seed: the seed of the run.
    """

    def __init__(
        self,
        state: TrainingState,
        stepper: Stepper,
        scaling: BatchScaling | None,
        share: Callable[[Iterable[torch.Tensor]], None],
        device: torch.device,
        *,
        rank: int,
        workers: int,
        seed: int,
    ) -> None:
        self._state, self._stepper, self._scaling = state, stepper, scaling
        self._share, self._device = share, device
        self._rank, self._workers, self._seed = rank, workers, seed

    def prepare(self, objects: Sequence[Any], ddp: Mapping[str, Any] | None) -> list[Any]:
        """Return the objects in their order, with trained models joined. ``ddp``: arguments of DistributedDataParallel; None: exchange
        gradients before steps."""
        if self._state.models:
            raise RunError("ctx.prepare was called twice. Prepare all models and their optimizers in one call.")
        modules = [item for item in objects if isinstance(item, torch.nn.Module)]
        trained = _trained(modules, [item for item in objects if isinstance(item, torch.optim.Optimizer)])
        if self._scaling is not None:
            _check_adaptive(trained)
        for module in modules:
            _check_shapes(module)
            module.to(self._device)
        others = [item for item in objects if not any(item is model for model in trained)]
        self._state.adopt([_plain(model) for model in trained], others)
        if self._scaling is not None:
            self._scaling.adopt(self._state.optimizers)
        joined = self._stepper.join(trained, ddp)
        if not self._state.resumed:
            wrapped = [model for model, with_ranks in zip(trained, joined, strict=True) if with_ranks is not model]
            self._share_weights(modules, wrapped)
            # The same seed built the model on all ranks; dropout differs by rank.
            torch.manual_seed(self._seed + self._rank)
        replacement = {id(model): with_ranks for model, with_ranks in zip(trained, joined, strict=True)}
        return [replacement.get(id(item), item) for item in objects]

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers (running statistics) when validation starts."""
        if self._workers > 1:
            for model in self._state.models:
                self._share(model.buffers())

    def _share_weights(self, models: Sequence[torch.nn.Module], wrapped: Sequence[torch.nn.Module]) -> None:
        """Give all ranks rank 0's weights and buffers of models: ranks may have drawn or read others, and an exchange of gradients keeps
        what differs. DistributedDataParallel has shared the parameters of the ``wrapped`` ones, and not their buffers."""
        if self._workers == 1:
            return
        tensors = [p for o in self._state.optimizers for group in o.param_groups for p in group["params"]]
        tensors += [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        shared = {id(p) for model in wrapped for p in model.parameters()}
        # By id, since optimizers and models hold the same tensors. The parts of a sharded tensor differ by rank.
        self._share({id(t): t for t in tensors if id(t) not in shared and not is_part(t)}.values())


def _trained(modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.nn.Module]:
    """The models of which an optimizer holds parameters; the first model if there are none.

    Others, such as a moving average of the weights, are kept and restored, but have no gradients to exchange.
    """
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [module for module in modules if any(id(p) in held for p in module.parameters())]
    return trained or list(modules[:1])


def _check_adaptive(trained: Sequence[torch.nn.Module]) -> None:
    """Raise RunError for models whose gradient noise cannot be measured."""
    if len(trained) > 1:
        raise RunError(
            f"ctx.prepare got {len(trained)} trained models, and the batch size adapts to the gradient of one. Pass a fixed batch_size."
        )
    if any(map(is_sharded, trained)):
        raise RunError(
            "ctx.prepare got a model that fully_shard has sharded, and the batch size adapts to the gradient of a whole one. Pass a "
            "fixed batch_size."
        )


def _check_shapes(module: torch.nn.Module) -> None:
    """Raise RunError for a lazy layer that no forward pass has given its shape."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise RunError(
                f"ctx.prepare got a {type(module).__name__} whose parameter {name!r} has no shape yet. Run the model once before, "
                "on an input of the shape that it will get: the first forward pass gives a lazy layer its shape."
            )


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model without the wrapper of torch.compile."""
    plain: torch.nn.Module = getattr(model, "_orig_mod", model)
    return plain
