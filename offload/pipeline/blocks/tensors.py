"""Tensors inside batches of any structure."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence


def _unchanged(leaf: Any) -> Any:
    return leaf


def map_tensors(
    value: Any, change: Callable[[torch.Tensor], Any], change_other: Callable[[Any], Any] = _unchanged
) -> Any:
    """The structure (dicts and other mappings, lists, tuples, named tuples, dataclasses) with every tensor changed.

    ``change_other`` changes everything that is neither a tensor nor such a structure.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(part, change, change_other) for key, part in value.items()}
        if type(value) is dict:
            return changed
        # A copy keeps the mapping's class and what else it holds, such as a default factory.
        whole: Any = copy.copy(value)
        for key, part in changed.items():  # the outputs of Hugging Face's models refuse update()
            whole[key] = part
        return whole
    if isinstance(value, PackedSequence):  # torch wants its batch sizes on the CPU
        data, *orders = (
            map_tensors(part, change, change_other)
            for part in (value.data, value.sorted_indices, value.unsorted_indices)
        )
        return type(value)(data, value.batch_sizes, *orders)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change, change_other) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change, change_other) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            # Also where the dataclass is frozen: the copy is ours.
            object.__setattr__(rebuilt, field.name, map_tensors(getattr(value, field.name), change, change_other))
        return rebuilt
    return change_other(value)


def bytes_of(batch: Any) -> int:
    """The bytes of the tensors of a batch, roughly."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(map(bytes_of, batch.values()))
    return sum(map(bytes_of, batch)) if isinstance(batch, list | tuple) else 0


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device. Objects with a method ``to``, such as batches of graphs, move themselves."""

    def to(leaf: Any) -> Any:
        if not _moves_itself(leaf):
            return leaf
        try:
            there = leaf.to(device)
        except (TypeError, AttributeError, ValueError):  # its method means something else, such as a time zone
            return leaf
        return leaf if there is None else there

    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True), to)


def record_use(batch: Any, device: torch.device, stream: Any) -> None:
    """Note that the stream uses the batch's memory on the device, which must not serve another batch before the stream is done."""

    def used(tensor: torch.Tensor) -> torch.Tensor:
        # A function of the user may return tensors on the CPU, too.
        if tensor.device.type == device.type:
            for part in _dense_parts(tensor):
                part.record_stream(stream)
        return tensor

    def used_within(leaf: Any) -> Any:
        if _moves_itself(leaf):
            if callable(getattr(type(leaf), "record_stream", None)):
                with contextlib.suppress(Exception):  # graphs on the CPU refuse
                    leaf.record_stream(stream)  # some hold tensors that Python does not see
            with contextlib.suppress(Exception):  # attributes may do anything
                for tensor in _tensors_within(leaf):
                    used(tensor)
        return leaf

    map_tensors(batch, used, used_within)


def _moves_itself(leaf: Any) -> bool:
    # Look at the class: an object may make up attributes.
    return not isinstance(leaf, type | torch.nn.Module) and callable(getattr(type(leaf), "to", None))


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors of which a sparse or nested one consists: torch only records the use of dense ones."""
    if tensor.is_nested:
        nested: Any = tensor
        yield nested.values()
        if tensor.layout == torch.jagged:
            yield from (part for part in (nested.offsets(), nested.lengths()) if part is not None)
    elif tensor.layout == torch.strided:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (
            (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
        )
        yield from (*indices, tensor.values())


_WITHOUT_TENSORS = frozenset({str, bytes, int, float, bool, complex, type(None), np.ndarray})


def _tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds in its attributes, however deep."""
    seen, coming = set[int](), [value]
    while coming:
        current = coming.pop()
        if id(current) in seen or isinstance(current, type | ModuleType | FunctionType):
            continue
        seen.add(id(current))
        if isinstance(current, torch.Tensor):
            yield current
            continue
        inside: Iterable[Any] = ()
        if isinstance(current, Mapping):
            inside = current.values()
        elif isinstance(current, list | tuple | set):
            inside = current
        coming += [one for one in inside if type(one) not in _WITHOUT_TENSORS]
        if isinstance(own := getattr(current, "__dict__", None), dict):
            coming += own.values()
        slots = [kind.__dict__.get("__slots__", ()) for kind in type(current).__mro__]
        names = [name for of in slots for name in ([of] if isinstance(of, str) else of)]
        coming += [getattr(current, name, None) for name in names if not name.startswith("__")]
