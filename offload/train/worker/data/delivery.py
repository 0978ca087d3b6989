"""From the rows of a local batch to tensors on the worker's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offload.errors import FAILURES, RunError
from offload.pipeline.blocks.device_placement import DevicePlacement
from offload.pipeline.blocks.memory import writable
from offload.pipeline.blocks.tensors import map_tensors
from offload.pipeline.blocks.whole_samples import is_nested
from offload.pipeline.blocks.wire import (
    HIDDEN,
    REMEDY_RAGGED,
    SAMPLE_ID,
    Columns,
    RaggedError,
    common_dtype,
    parts_of_columns,
    stack,
    torch_only,
)
from offload.pipeline.preprocessing.wording import say
from offload.train.worker.data.cutting import Cut

VIEWED_ROW_BYTES = 4096
_TENSORS = frozenset(
    np.dtype(name)
    for name in [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)  # numpy types for torch tensors; columns of other types stay arrays


class Delivery:
    """Makes batches on a device. On a GPU, it copies from pinned memory on a stream of its own.

    Args:
        device: the device.
        collate_fn: makes a batch of whole samples; None: their values are stacked, as torch's ``default_collate`` does.
        on_device: functions of each batch on the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        on_device: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self._collate_fn = collate_fn
        self._placement = DevicePlacement(device if device.type == "cuda" else None, on_device)

    def deliver(self, cut: Cut) -> tuple[Any, Any]:
        """(the batch on the device, the event of its arrival there). The batch is a dict with the column ``sample_id``, or what
        ``collate_fn`` returned.

        Raises RunError if samples do not form a batch, or if ``collate_fn`` raises.
        """
        if cut.pieces:
            visible = [{n: column for n, column in piece.items() if n not in HIDDEN} for piece in cut.pieces]
            return self._placement.place({name: as_tensor(column) for name, column in self._joined(visible).items()})
        batch = self._collated(list(cut.samples), cut.ids)
        if type(batch) is dict:
            _check_free(batch, cut.ids)
            # A copy, since collate_fn may return a sample itself, and fillers use samples again.
            batch = {**batch, SAMPLE_ID: torch.tensor(cut.ids, dtype=torch.int64)}
        if self._placement.copies:
            batch = map_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())
        return self._placement.place(batch)

    def arrived(self, batch: Any, event: Any) -> None:
        """Let the training stream wait for a batch, and keep its memory from serving another one before."""
        self._placement.hand_over(batch, event)

    def _collated(self, samples: list[Any], ids: Sequence[int]) -> Any:
        if self._collate_fn is None:
            return _columns_of(samples, ids)
        try:
            return self._collate_fn(samples)
        except RunError:
            raise
        except FAILURES as error:
            name = getattr(self._collate_fn, "__qualname__", type(self._collate_fn).__name__)
            raise RunError(
                f"the collate_fn {name} raised {say(error)} on {len(samples)} samples, {min(ids)} to {max(ids)}. Correct it: it gets a "
                "list of samples, as the data set or its transform returned them."
            ) from None

    def _joined(self, pieces: list[Columns]) -> Columns:
        """Join views of blocks to one batch. This is the only copy of the data path, to pinned memory for a GPU. On a CPU, a batch
        that lies within a block is a view of it."""
        joined: Columns = {}
        for name, parts in parts_of_columns(pieces, [len(piece[SAMPLE_ID]) for piece in pieces]).items():
            if not all(isinstance(p, np.ndarray) for p in parts):
                joined[name] = [row for part in parts for row in part]
                continue
            arrays = [p for p in parts if isinstance(p, np.ndarray)]
            if len(arrays) == 1 and not self._placement.copies:
                joined[name] = writable(arrays[0]) if _worth_a_view(arrays[0]) else arrays[0].copy()
                continue
            other = next((i for i, a in enumerate(arrays) if a.shape[1:] != arrays[0].shape[1:]), None)
            if other is not None:
                ids = [int(pieces[i][SAMPLE_ID][0]) for i in (0, other)]
                raise _ragged(name, (arrays[0].shape[1:], arrays[other].shape[1:]), ids)
            dtype = common_dtype(array.dtype for array in arrays)
            if dtype is None:
                joined[name] = [row for array in arrays for row in array]
                continue
            shape = (sum(len(a) for a in arrays), *arrays[0].shape[1:])
            # Other types stay on the host, and pinned memory is scarce.
            pin = self._placement.copies and _is_numeric(arrays[0])
            target = _pinned(shape, dtype) if pin else np.empty(shape, dtype)
            joined[name] = np.concatenate(arrays, out=target)
        return joined


def _check_free(batch: dict[Any, Any], ids: Sequence[int]) -> None:
    """Raise RunError for a batch whose own content would be lost under the name of the samples' ids."""
    own = batch.get(SAMPLE_ID)
    if own is not None and not (isinstance(own, torch.Tensor) and own.tolist() == list(ids)):
        raise RunError(
            f"the name of a column of a batch is {SAMPLE_ID!r}, which offload adds itself. Give it another name in the data set, its "
            "transform or the collate_fn."
        )


def _columns_of(samples: list[Any], ids: Sequence[int]) -> Any:
    """The batch of samples without a ``collate_fn``: a dict of their columns, if they are dicts."""
    if all(isinstance(sample, Mapping) for sample in samples):
        # As in columns, what a sample lacks is None.
        names = dict.fromkeys(name for sample in samples for name in sample)
        return {name: _column(str(name), [sample.get(name) for sample in samples], ids) for name in names}
    return _column("", samples, ids)


def _column(name: str, values: list[Any], ids: Sequence[int]) -> Any:
    try:
        return _stacked(values)
    except RaggedError as error:
        if is_nested(values):
            return values  # such as targets with different numbers of boxes
        raise _ragged(name, error.shapes, [ids[row] for row in error.rows]) from None


def _stacked(values: list[Any]) -> Any:
    """Structures by element, arrays and numbers stacked, other values as a list. Raises RaggedError for arrays that differ in shape."""
    first = values[0]
    if isinstance(first, Mapping) and _alike(values):
        return {key: _stacked([value[key] for value in values]) for key in first}
    if not is_nested(values):
        return as_tensor(stack("", values))
    if isinstance(first, list | tuple) and all(
        isinstance(value, list | tuple) and len(value) == len(first) for value in values
    ):
        parts = [_stacked([value[i] for value in values]) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else parts
    return values


def _alike(values: Sequence[Any]) -> bool:
    """Return whether all are mappings with the same keys."""
    return all(isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values)


def _ragged(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], ids: list[int]) -> RunError:
    return RunError(
        f"column {name!r} has rows of different shapes: {shapes[0]} for sample {ids[0]}, {shapes[1]} for sample {ids[1]}. "
        f"{REMEDY_RAGGED}"
    )


def _worth_a_view(column: np.ndarray[Any, Any]) -> bool:
    """Return whether the rows are large. Small rows (labels) are copied: users keep them, and a view would keep the whole block."""
    return column.nbytes >= VIEWED_ROW_BYTES * len(column) and column.flags.c_contiguous


def _is_numeric(column: object) -> bool:
    return isinstance(column, np.ndarray) and column.dtype in _TENSORS


def as_tensor(column: Any) -> Any:
    """The array as a tensor, if torch has its type; anything else unchanged."""
    if not isinstance(column, np.ndarray):
        return column
    if column.dtype in _TENSORS:
        return torch.from_numpy(column)
    if (name := torch_only(column.dtype)) is not None:
        return torch.from_numpy(column.view(f"i{column.dtype.itemsize}")).view(getattr(torch, name))
    return column


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return np.asarray(torch.empty(shape, dtype=kind, pin_memory=True).numpy())
