"""The options of optimizers that outlast a checkpoint of another run, such as a learning rate that a search has mutated.

A checkpoint restores the options of its optimizers, too. Where a run goes on from a checkpoint of another one, its own options count.
Learning rates of schedulers change in proportion to the rate at which both schedules begin, so that the schedule goes on at its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

INITIAL = "initial_lr"  # in a parameter group, where a scheduler of torch notes the rate at which it begins
RATE = "lr"


class KeptOptions:
    """The options of these optimizers, and the rates of schedulers among the other objects, as they are before a checkpoint is loaded."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], others: Sequence[Any]) -> None:
        self._optimizers = list(optimizers)
        self._options = [_options(group) for group in self._groups]
        kinds = torch.optim.lr_scheduler.LRScheduler
        self._schedulers = [
            (item, list(item.base_lrs)) for item in others if isinstance(item, kinds) and hasattr(item, "base_lrs")
        ]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def apply(self) -> None:
        """Put the options back, after a checkpoint is loaded."""
        for group, options in zip(self._groups, self._options, strict=True):
            rate = rate_of(options, group)
            group.update(options)
            if rate is not None:
                group[RATE] = rate
        for scheduler, base_rates in self._schedulers:
            scheduler.base_lrs = base_rates
            scheduler._last_lr = [group[RATE] for group in scheduler.optimizer.param_groups]


def rate_of(options: Mapping[str, Any], stored: Mapping[str, Any]) -> Any:
    """The learning rate of a group with these options that goes on where a group with ``stored`` options was."""
    begins, began = options.get(INITIAL), stored.get(INITIAL)
    if begins is None or not began:
        return options.get(RATE)  # nothing schedules it
    return stored[RATE] * (begins / began)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group. A rate may be a tensor that the optimizer changes in place."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
