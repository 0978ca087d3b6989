"""Batches and samples of any structure on their way from a preprocessing process to the process that trains on them.

A batch travels as a pickle of its structure, with the contents of large tensors and arrays beside it. The receiver maps these contents
in shared memory and copies nothing. Small contents travel inside the pickle and are copied on arrival: a program that keeps the labels of
an epoch must not keep its images in the object store.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.pipeline.blocks.memory import writable
from offload.pipeline.program.pickling import PicklerBack

if TYPE_CHECKING:
    from offload.pipeline.blocks.wire import Array

BESIDE_BYTES = 64 << 10


@dataclass(frozen=True)
class Packed:
    """A batch: the pickle of its structure, and the contents that lie beside it."""

    structure: bytes
    contents: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return len(self.structure) + sum(content.nbytes for content in self.contents)


def pack(
    batch: Any, *, copied: bool = False, beside_bytes: int = BESIDE_BYTES, home: bool = False, by_name: bool = False
) -> Packed:
    """Pack a batch. Raises what pickling raises for objects that cannot be sent.

    Args:
        copied: copy the contents, since the batch's memory may change before they are stored.
        beside_bytes: the least size of contents that travel beside the pickle.
        home: the batch goes to the process that has sent the classes of its objects.
        by_name: the batch goes to the process from which this one was forked. It has the same classes, under the same names.
    """
    if by_name:
        with contextlib.suppress(Exception):  # of a class without a name that leads to it, for one
            return _pack(batch, _NamePickler, copied, beside_bytes)
    return _pack(batch, functools.partial(_Pickler, home=home), copied, beside_bytes)


def _pack(batch: Any, pickler: Callable[..., pickle.Pickler], copied: bool, beside_bytes: int) -> Packed:
    contents: list[Array] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < beside_bytes:
            return True  # inside
        content = np.frombuffer(raw, np.uint8)
        contents.append(content.copy() if copied else content)
        return False

    written = io.BytesIO()
    pickler(written, buffer_callback=beside).dump(batch)
    return Packed(written.getvalue(), tuple(contents))


def unpack(packed: Packed) -> Any:
    """The batch. Its large tensors and arrays are writable views of the contents' memory."""
    return pickle.loads(packed.structure, buffers=[writable(content) for content in packed.contents])


class _Pickler(PicklerBack):
    """Pickles dense tensors on the CPU as NumPy arrays, which pickle can leave beside the structure. torch's own pickles copy them."""

    def _rule(self, kind: type) -> Any:
        return _tensor if issubclass(kind, torch.Tensor) else super()._rule(kind)


class _NamePickler(pickle.Pickler):
    """Pickles tensors as :class:`_Pickler` does, and all else as pickle does."""

    def __init__(self, file: Any, *, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        return _tensor(obj) if isinstance(obj, torch.Tensor) else NotImplemented


def _tensor(tensor: torch.Tensor) -> Any:
    return (_rebuilt, (*_laid_out(tensor), _facts(tensor))) if _is_plain(tensor) else NotImplemented


_OWN_WAY = (torch.nn.Parameter, torch.nn.UninitializedParameter, torch.nn.Buffer)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values lie in memory like an array's, and its attributes are all else that a pickle needs."""
    return (
        type(tensor).__reduce_ex__ is torch.Tensor.__reduce_ex__
        and not isinstance(tensor, _OWN_WAY)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and (tensor.is_leaf or not tensor.requires_grad)
    )


def _laid_out(tensor: torch.Tensor) -> tuple[Array, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """The tensor's values as one run of bytes, with type, shape and strides. Overlapping or spread values become contiguous."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if not _is_dense(plain.shape, plain.stride()):
        plain = plain.contiguous()
    # In the order of memory, whatever the order of dimensions: a channels-last tensor needs no copy.
    flat = torch.as_strided(plain, (plain.numel(),), (1,), plain.storage_offset())
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape), tuple(plain.stride())


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements fill a stretch of memory without gaps or overlaps, in some order of the dimensions.

    That holds if, in the order of strides, each stride is the product of the sizes before it.
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _facts(tensor: torch.Tensor) -> tuple[type[torch.Tensor], bool, dict[str, Any]]:
    """All that a tensor has beside its values: its class, whether it requires a gradient, its attributes."""
    return type(tensor), tensor.requires_grad, dict(getattr(tensor, "__dict__", {}))


def _rebuilt(
    content: Array,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    facts: tuple[type[torch.Tensor], bool, dict[str, Any]],
) -> torch.Tensor:
    kind, requires_grad, attributes = facts
    flat = torch.from_numpy(content).view(dtype)
    tensor = torch.as_strided(flat, shape, strides)
    if kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if requires_grad else tensor
