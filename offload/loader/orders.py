"""The orders of an epoch's batches, from what its sampler gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, MutableSequence, Sized
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError
from offload.loader.recipe import BatchOrder


def orders_of(indices: Iterator[Any], *, batches: bool, skip: int, seed: int) -> Iterator[BatchOrder]:
    """The orders of an epoch, in which ``skip`` batches are made already. ``indices``: what the sampler gives. ``batches``: whether it
    gives batches of indices, not single ones. This draws the skipped batches at once, and the others as they are asked for.

    Raises ConfigError if there are fewer than ``skip`` batches.
    """
    kept = (_kept(each, batches) for each in indices)
    made = [len(each) if batches else 1 for each in itertools.islice(kept, skip)]
    if len(made) < skip:
        raise ConfigError(
            f"the state of the DataLoader was taken after {skip} batches of an epoch, and the sampler gives {len(made)} now. "
            "Resume with the data set, the sampler and the batch size with which the state was taken."
        )
    return _orders(kept, batches=batches, skip=skip, first=sum(made), seed=seed)


def _orders(kept: Iterator[Any], *, batches: bool, skip: int, first: int, seed: int) -> Iterator[BatchOrder]:
    for number, each in enumerate(kept):
        yield BatchOrder(number=number, batch=skip + number, indices=each, first=first, seed=seed)
        first += len(each) if batches else 1


def _kept(indices: Any, batches: bool) -> Any:
    """The indices as the sampler gave them. It may fill the same list or array again, which torch has used by then."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, np.ndarray | MutableSequence):
        return copy.copy(indices)
    return list(indices) if batches and not isinstance(indices, Sized) else indices
