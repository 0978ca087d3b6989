"""The orders of an epoch's batches, from what its sampler gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, MutableSequence, Sized
from typing import Any

import numpy as np
import torch

from offload.loader.recipe import BatchOrder
from offload.loader.state.progress import too_few


def orders_of(
    indices: Iterator[Any], *, batches: bool, skip: int, seed: int, note: Callable[[Any], None]
) -> Iterator[BatchOrder]:
    """The orders of an epoch, in which ``skip`` batches are made already. ``indices``: what the sampler gives. ``batches``: whether it
    gives batches of indices, not single ones. This draws the skipped batches at once, and the others as they are asked for. ``note`` is
    told what the sampler gave for each batch, the skipped ones too.

    Raises ConfigError if there are fewer than ``skip`` batches.
    """
    kept = _noted((_kept(each, batches) for each in indices), note)
    made = [len(each) if batches else 1 for each in itertools.islice(kept, skip)]
    if len(made) < skip:
        raise too_few(skip, "sampler", len(made))
    return _orders(kept, batches=batches, skip=skip, first=sum(made), seed=seed)


def _orders(kept: Iterator[Any], *, batches: bool, skip: int, first: int, seed: int) -> Iterator[BatchOrder]:
    for number, each in enumerate(kept):
        yield BatchOrder(number=number, batch=skip + number, indices=each, first=first, seed=seed)
        first += len(each) if batches else 1


def _noted(indices: Iterator[Any], note: Callable[[Any], None]) -> Iterator[Any]:
    for each in indices:
        note(each)
        yield each


def _kept(indices: Any, batches: bool) -> Any:
    """The indices as the sampler gave them. It may fill the same list or array again, which torch has used by then."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, np.ndarray | MutableSequence):
        return copy.copy(indices)
    return list(indices) if batches and not isinstance(indices, Sized) else indices
