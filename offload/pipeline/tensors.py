"""Tensors inside batches of any structure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The structure (dicts and other mappings, lists, tuples, named tuples, dataclasses) with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(each, change) for key, each in value.items()}
        if type(value) is dict:
            return changed
        whole: Any = copy.copy(value)
        for key, each in changed.items():  # the outputs of Hugging Face's models refuse update()
            whole[key] = each
        return whole
    if isinstance(value, PackedSequence):  # torch wants its batch sizes on the CPU
        data, *orders = (
            map_tensors(each, change) for each in (value.data, value.sorted_indices, value.unsorted_indices)
        )
        return type(value)(data, value.batch_sizes, *orders)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(each, change) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(rebuilt, field.name, map_tensors(getattr(value, field.name), change))
        return rebuilt
    return value
