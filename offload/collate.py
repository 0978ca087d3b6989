"""Ready-made collate functions for samples that differ in shape: ``from_torch(dataset, collate_fn=collate.pad())``.

They take samples as dicts, or as tuples and lists, and work with torch's own DataLoader, too. With ``max_tokens``, a batch holds as many
samples as fit, and each token has the same weight in the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from offload.errors import ConfigError, RunError
from offload.model.checks import check_count, shown

__all__ = ["lists", "nest", "pack", "pad"]


class _Collate:
    """A collate function, by default for values that differ in shape.

    Attributes:
        max_tokens: the most tokens of a batch; None: no limit.
    """

    def __init__(self, name: str, max_tokens: int | None, length: Any) -> None:
        if max_tokens is not None:
            max_tokens = check_count(f"{name}: max_tokens", max_tokens, least=1, sane="such as 4096")
        self.max_tokens = max_tokens
        self._name, self._length = name, length

    def tokens(self, sample: Any) -> int:
        """The number of a sample's tokens: the length of the value that ``length`` names, or else of the first that is neither text nor
        a single number.

        Raises RunError if that value is no array of numbers.
        """
        if self._length is not None:
            return self._counted(sample, self._length, _value(sample, self._length))
        for name, value in _values(sample):
            if not _is_single(value):
                return self._counted(sample, name, value)
        raise RunError(
            f"{self._name} counts the tokens of a sample by its first array of numbers, and a sample has none: {shown(sample)}. Return "
            "one from the data set or its transform, such as the text's token ids."
        )

    def _counted(self, sample: Any, name: Any, value: Any) -> int:
        if (length := _length_of(value)) is not None:
            return length
        # Another array may be the wrong one: where this value is missing in some samples only, batches would count different columns.
        others = [key for key, other in _values(sample) if not _is_single(other) and _length_of(other) is not None]
        raise RunError(
            f"{self._name} counts the tokens of a sample by its {_named(name)}, which holds {shown(value)}: that has no length of tokens. "
            f"Name the column of tokens: {self._name}(length={[*others, 'input_ids'][0]!r}, ...)."
        )


class pad(_Collate):  # used like a function
    """Pad values to the largest of the batch, and stack them.

    Values of equal shapes are stacked as they are. Others are padded at their ends. The mask is a bool tensor of shape (samples,
    length), True for the real elements along the first dimension of the value that ``length`` names, or else of the first padded value. For
    tuples, it comes last. A batch that happens to need no padding has a mask, too, True everywhere: without ``length``, that of the first
    value, if all values with a dimension are sequences. Beside images or boxes, name ``length`` to get the same mask with every batch.

    Args:
        values: the value to pad with, by column (or by position, for tuples). Others are padded with 0.
        mask: the name of the mask's column; None leaves it out. A column of this name that the samples have themselves stays, padded like
            the others: it may know more, or be the mask of an image.
        multiple_of: round lengths up to a multiple of this: always of the columns in ``values`` and ``length``, of others if they differ.
        max_tokens: the most tokens of a batch, before padding.
        length: the column whose length counts as the number of tokens; None: the first that is neither text nor a single number.

    Example::

        offload.from_torch(texts, collate_fn=collate.pad({"labels": -100}, mask="attention_mask"))

    Raises ConfigError for invalid arguments.
    """

    def __init__(
        self,
        values: Mapping[Any, float] | None = None,
        *,
        mask: str | None = "mask",
        multiple_of: int = 1,
        max_tokens: int | None = None,
        length: Any = None,
    ) -> None:
        super().__init__("pad", max_tokens, length)
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(
                f"pad: values must be a dict of padding values by column, such as {{'labels': -100}}, found {shown(values)}."
            )
        self._values, self._mask = dict(values or {}), mask
        self._multiple = check_count("pad: multiple_of", multiple_of, least=1, sane="such as 8")

    def __call__(self, samples: list[Any]) -> Any:
        masks: dict[Any, torch.Tensor] = {}
        unpadded: dict[Any, list[torch.Tensor]] = {}  # values with a dimension that need no padding

        def collated(name: Any, values: list[Any]) -> Any:
            tensors = _tensors(values)
            own_mask = name == self._mask and tensors is not None and tensors[0].ndim == 1
            named = own_mask or name in self._values or name == self._length
            if tensors is None or (not named and len({t.shape for t in tensors}) == 1):
                if tensors is not None and tensors[0].ndim:
                    unpadded[name] = tensors
                return _stacked(values, tensors)
            if len({t.ndim for t in tensors}) > 1 or tensors[0].ndim == 0:
                dimensions = " and ".join(sorted({str(t.ndim) for t in tensors}))
                raise RunError(
                    f"collate.pad cannot pad {_named(name)}: its values have {dimensions} dimensions. Give them equally many, at least 1."
                )
            sizes = [max(t.shape[d] for t in tensors) for d in range(tensors[0].ndim)]
            sizes[0] += -sizes[0] % self._multiple
            whole = torch.full((len(tensors), *sizes), self._values.get(name, 0), dtype=tensors[0].dtype)
            real = torch.zeros((len(tensors), sizes[0]), dtype=torch.bool)
            for i, tensor in enumerate(tensors):
                place: tuple[Any, ...] = (i, *(slice(size) for size in tensor.shape))
                whole[place] = tensor
                real[i, : len(tensor)] = True
            masks[name] = real
            return whole

        batch = _by_column(samples, collated)
        if not masks and (tensors := self._sequence(unpadded)) is not None:
            # A batch of texts that happen to be equally long has the same parts as any other.
            masks[None] = torch.ones((len(tensors), len(tensors[0])), dtype=torch.bool)
        if self._mask is None or not masks:
            return batch
        return _extended(batch, {self._mask: masks.get(self._length, next(iter(masks.values())))})

    def _sequence(self, unpadded: Mapping[Any, list[torch.Tensor]]) -> list[torch.Tensor] | None:
        """The value to which the mask of a batch without padding belongs; None if it has none."""
        alike = all(tensors[0].ndim == 1 for tensors in unpadded.values())
        return next(iter(unpadded.values()), None) if alike else None


class pack(_Collate):
    """Concatenate the values of all samples along their first dimension, without padding.

    The batch holds two more columns: ``position_ids``, int64, the place of each element in its sample, and ``cu_seqlens``, int32 of shape
    (samples + 1,), the offsets of the samples, as kernels for sequences of different lengths take them. Columns of these names
    that the samples have themselves stay. Numbers become one tensor with an element per sample.

    Args:
        max_tokens: the most tokens of a batch.
        length: the column whose length counts as the number of tokens; None: the first that is neither text nor a single number.

    Example::

        offload.from_torch(texts, collate_fn=collate.pack(max_tokens=4096))

    Raises ConfigError for invalid arguments.
    """

    def __init__(self, *, max_tokens: int | None = None, length: Any = None) -> None:
        super().__init__("pack", max_tokens, length)

    def __call__(self, samples: list[Any]) -> Any:
        def collated(name: Any, values: list[Any]) -> Any:
            tensors = _tensors(values)
            return _as_torch(values) if tensors is None or tensors[0].ndim == 0 else torch.cat(tensors)

        batch = _by_column(samples, collated)
        lengths = torch.tensor([self.tokens(sample) for sample in samples])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        return _extended(batch, {"position_ids": positions, "cu_seqlens": offsets})


class nest(_Collate):
    """Values that differ in shape become nested tensors (``torch.nested``, of the jagged layout); others are stacked.

    Args:
        max_tokens: the most tokens of a batch.
        length: the column whose length counts as the number of tokens; None: the first that is neither text nor a single number.

    Raises ConfigError for invalid arguments.
    """

    def __init__(self, *, max_tokens: int | None = None, length: Any = None) -> None:
        super().__init__("nest", max_tokens, length)

    def __call__(self, samples: list[Any]) -> Any:
        def collated(name: Any, values: list[Any]) -> Any:
            tensors = _tensors(values)
            if tensors is None or len({t.shape for t in tensors}) == 1:
                return _stacked(values, tensors)
            return torch.nested.nested_tensor(tensors, layout=torch.jagged)

        return _by_column(samples, collated)


class lists(_Collate):
    """Every column becomes a list with one entry per sample, as detection models take images and targets.

    Args:
        max_tokens: the most tokens of a batch.
        length: the column whose length counts as the number of tokens; None: the first that is neither text nor a single number.

    Raises ConfigError for invalid arguments.
    """

    def __init__(self, *, max_tokens: int | None = None, length: Any = None) -> None:
        super().__init__("lists", max_tokens, length)

    def __call__(self, samples: list[Any]) -> Any:
        return _by_column(samples, lambda name, values: values)


def _by_column(samples: Sequence[Any], collated: Any) -> Any:
    """The columns of samples, each collated from its values: a dict for dicts, a tuple for tuples and lists, one value for others."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: collated(name, [sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(collated(i, list(values)) for i, values in enumerate(zip(*samples, strict=True)))
    return collated(0, list(samples))


def _extended(batch: Any, more: Mapping[str, Any]) -> Any:
    """The batch that :func:`_by_column` made, with more columns at its end. Columns of the samples stay as they are."""
    if isinstance(batch, dict):
        return {**batch, **{name: value for name, value in more.items() if name not in batch}}
    return (*(batch if isinstance(batch, tuple) else (batch,)), *more.values())


def _tensors(values: list[Any]) -> list[torch.Tensor] | None:
    """The values as tensors of one type; None for others, such as text."""
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError):
        return None
    # An empty list has no type of its own: torch takes it for float32.
    kinds = {t.dtype for t in tensors if t.numel()}
    common = functools.reduce(torch.promote_types, kinds) if kinds else tensors[0].dtype
    return [t.to(common) for t in tensors]


def _stacked(values: list[Any], tensors: list[torch.Tensor] | None) -> Any:
    """Values of one shape in one tensor; other values as torch collates them."""
    if tensors is not None and any(isinstance(value, list | tuple) for value in values):
        return torch.stack(tensors)  # torch takes a list of numbers for a structure, and would collate it by element
    return _as_torch(values)


def _as_torch(values: list[Any]) -> Any:
    """Values as torch collates them. Those that it refuses, such as dates, None and lists of texts, stay a list, as without a function."""
    if all(isinstance(value, list | tuple) and all(isinstance(text, str) for text in value) for value in values):
        return values  # torch would collate lists of one length by element, and refuse others
    try:
        return default_collate(values)
    except (TypeError, RuntimeError, ValueError, KeyError, AttributeError):
        return values


def _value(sample: Any, name: Any) -> Any:
    try:
        return sample[name]
    except (KeyError, IndexError, TypeError):
        raise RunError(
            f"a collate function counts the tokens of {_named(name)}, and a sample has no such value."
        ) from None


def _values(sample: Any) -> list[tuple[Any, Any]]:
    """The values of a sample with their names, or with their places."""
    if isinstance(sample, Mapping):
        return list(sample.items())
    return list(enumerate(sample)) if isinstance(sample, tuple | list) else [(0, sample)]


def _is_single(value: Any) -> bool:
    """Return whether the value is text or one number, as ids and labels are: never a sequence of tokens, in any sample."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 0
    return isinstance(value, str | bytes | bool | int | float | np.generic)


def _length_of(value: Any) -> int | None:
    """The length of an array of numbers; None for anything else."""
    if _is_single(value):
        return None
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return int(tensor.shape[0]) if tensor.ndim else None


def _named(name: Any) -> str:
    return f"value {name}" if isinstance(name, int) else f"column {name!r}"
