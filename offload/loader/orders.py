"""The orders of an epoch's batches, from the indices that its sampler draws."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, MutableSequence, Sized
from typing import Any

import numpy as np
import torch

from offload.loader.batch_recipe import BatchOrder
from offload.loader.state.epoch_progress import too_few


def orders_of(
    indices: Iterator[Any], *, batches: bool, skip: int, seed: int, note: Callable[[Any], None]
) -> Iterator[BatchOrder]:
    """The orders of an epoch whose first ``skip`` batches the program has already.

    This draws the skipped batches at once, and the others as the caller asks for them.

    Args:
        indices: the sampler's draws.
        batches: whether a draw is a batch of indices, not a single one.
        note: called with each draw, the skipped ones too.

    Raises:
        ConfigError: if there are fewer than ``skip`` batches.
    """
    draws = _noted((_own(draw, batches) for draw in indices), note)
    skipped = [len(draw) if batches else 1 for draw in itertools.islice(draws, skip)]
    if len(skipped) < skip:
        raise too_few(skip, "sampler", len(skipped))
    return _orders(draws, batches=batches, skip=skip, first=sum(skipped), seed=seed)


def _orders(draws: Iterator[Any], *, batches: bool, skip: int, first: int, seed: int) -> Iterator[BatchOrder]:
    for number, draw in enumerate(draws):
        yield BatchOrder(number=number, batch=skip + number, indices=draw, first=first, seed=seed)
        first += len(draw) if batches else 1


def _noted(indices: Iterator[Any], note: Callable[[Any], None]) -> Iterator[Any]:
    for draw in indices:
        note(draw)
        yield draw


def _own(indices: Any, batches: bool) -> Any:
    """A copy of the sampler's indices. It may refill the same list or array, which torch would have used by then."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, np.ndarray | MutableSequence):
        return copy.copy(indices)
    return list(indices) if batches and not isinstance(indices, Sized) else indices
