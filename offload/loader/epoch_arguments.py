"""The arguments that decide which batches an epoch has. A state in the middle of an epoch holds them, and the resumed loader must have the
same.

Where it stops: it compares what it can read without running the user's code. :mod:`offload.loader.state.trail` finds samplers of other
kinds that give another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from offload.errors import ConfigError
from offload.loader.job.ranks import Ranks
from offload.model.checks import shown

GENERATOR = "torch.Generator"  # that of a loader that has one

# The words of an error for each argument, in the order of comparison: the first that differs usually makes others differ, too.
_SAID = {
    "dataset": "{}",
    "world_size": "{} ranks",
    "num_workers": "num_workers={}",
    "batch_size": "batch_size={}",
    "sampler": "a {}",
    "num_replicas": "num_replicas={} in its sampler",
    "replica": "rank={} in its sampler",
    "shuffle": "shuffle={} in its sampler",
    "sampler_seed": "seed={} in its sampler",
    "replacement": "replacement={} in its sampler",
    "length": "{} samples",
    "batches": "{} batches",
    "drop_last": "drop_last={}",
    "sampler_drop_last": "drop_last={} in its sampler",
    "generator": "generator={}",
    "seed": "seed={}",
}
_OF_A_RANK = {"replica", "length", "batches"}  # these differ between the ranks of one job
_MAY_BE_NONE = {"batch_size", "seed", "generator"}  # here None is a value, elsewhere it means unknown
_HINTS = {"RandomSampler": " (shuffle=True)", "SequentialSampler": " (shuffle=False)"}
_TORCHS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_LISTS = (list, tuple, range, np.ndarray, torch.Tensor)


def samplers_of(*outermost: Any) -> list[Any]:
    """These samplers and those from which they draw, each before its sources."""
    samplers: list[Any] = []
    todo = list(outermost)
    while todo:
        sampler = todo.pop(0)
        if sampler is not None and not any(sampler is other for other in samplers):
            samplers.append(sampler)
            todo += [getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
    return samplers


def arguments_of(loader: torch.utils.data.DataLoader[Any], job: Ranks) -> dict[str, Any]:
    """The arguments of a loader that decide which batches an epoch has, as plain data."""
    arguments = {
        "rank": job.rank,
        "world_size": job.world_size,
        "generator": None if loader.generator is None else GENERATOR,
        "seed": getattr(loader, "seed", None),
    }
    if isinstance(loader.dataset, IterableDataset):
        arguments |= {
            "dataset": "an iterable data set",
            "num_workers": loader.num_workers,
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "length": _length(loader.dataset),
        }
    else:
        arguments |= {"dataset": "a map-style data set", "batch_size": None, **_order_of(loader)}
    return {name: _plain(value) for name, value in arguments.items() if value is not None or name in _MAY_BE_NONE}


def _order_of(loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
    """The arguments that decide the order of a map-style data set."""
    arguments: dict[str, Any] = {}
    names = []
    samplers = samplers_of(loader._index_sampler)
    for sampler in samplers:
        if type(sampler) is BatchSampler:
            arguments |= {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last}
        else:
            names.append("list" if type(sampler) in _LISTS else type(sampler).__qualname__)
        if isinstance(sampler, DistributedSampler):
            arguments |= {
                "num_replicas": sampler.num_replicas,
                "replica": sampler.rank,
                "shuffle": sampler.shuffle,
                "sampler_seed": sampler.seed,
                "sampler_drop_last": sampler.drop_last,
            }
        if isinstance(sampler, RandomSampler):
            arguments["replacement"] = sampler.replacement
    last = samplers[-1]
    if type(last) in _LISTS:
        arguments["batches" if last is loader.batch_sampler else "length"] = _length(last)
    else:
        arguments["length"] = _length(last if type(last) in _TORCHS else loader.dataset)
    return {**arguments, "sampler": names}


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the arguments saved in a state with those of the loader that resumes.

    Raises ConfigError for the first one that differs. An argument that one of them lacks is not compared.
    """
    one_rank = saved.get("rank", now["rank"]) == now["rank"]
    for name, said in _SAID.items():
        if name not in saved or name not in now or (name in _OF_A_RANK and not one_rank):
            continue
        if saved[name] != now[name]:
            before, after = (said.format(_shown(arguments[name])) for arguments in (saved, now))
            raise ConfigError(
                f"the state of the DataLoader was taken in an epoch with {before}, and this loader has {after}: the rest of that epoch "
                f"would repeat samples or leave some out. Resume with {before}, or load no state and begin the epoch anew. A state that is "
                "taken between two epochs allows other arguments."
            )
    # Nobody can see whether an iterable data set draws random numbers, so assume that it does.
    if not one_rank and "num_workers" in now and now["seed"] is None:
        raise other_rank(saved["rank"], now["rank"])


def other_rank(saved: int, now: int) -> ConfigError:
    """The error for a state of another rank, whose random numbers decide the order."""
    return ConfigError(
        f"the state of the DataLoader was taken at rank {saved}, and this is rank {now}, whose random numbers it does not hold: this rank "
        "would repeat samples or leave some out. Save and load the state of every rank, use a DistributedSampler, or pass seed= for an "
        "iterable data set."
    )


def _plain(value: Any) -> Any:
    """The value, as a Python number if it is one of NumPy's, for JSON."""
    return value.item() if isinstance(value, np.generic) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " over a ".join(f"{name}{_HINTS.get(name, '')}" for name in value)
    return value if isinstance(value, str) else shown(value) if value is not None else "None"


def _length(source: Any) -> int | None:
    """The number of samples. None if ``source`` does not tell it."""
    try:
        return len(source)
    except Exception:  # the user's method may raise anything
        return None
