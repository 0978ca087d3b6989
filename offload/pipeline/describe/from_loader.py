"""A torch DataLoader as the description of a data set: its samples, their order, how they become batches.

The Trainer takes from a loader what describes the data. What describes torch's own worker processes (``num_workers``,
``prefetch_factor``, ``pin_memory``) has no meaning here, and the seed is the Trainer's. Samplers other than torch's own can only run in
the program, so they are refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from offload.errors import ConfigError
from offload.pipeline.describe.combine import weighted
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.describe.sources import as_pipeline, from_torch

_KNOWN: tuple[type[Sampler[Any]], ...] = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


def described(name: str, value: object) -> Pipeline:
    """The pipeline of ``datasets={name: value}``: a DataLoader's, or what :func:`offload.pipeline.describe.sources.as_pipeline` gives.

    Raises ConfigError for a value that describes no data set, or a loader whose order the run cannot follow.
    """
    return from_loader(name, value) if isinstance(value, DataLoader) else as_pipeline(name, value)


def from_loader(name: str, loader: DataLoader[Any]) -> Pipeline:
    """The pipeline of a loader of map-style data, whose batches are those of its ``collate_fn``.

    Raises ConfigError for an iterable data set, a loader without batches, and samplers that are not torch's own.
    """
    where = f"datasets[{name!r}] is a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{where} over the iterable data set {type(loader.dataset).__name__}, and the Trainer needs a length and an index. Iterate "
            "over an offload.DataLoader in a loop of your own, or pass a ray.data.Dataset."
        )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        option = "batch_size=None" if batches is None else f"the batch sampler {type(batches).__name__}"
        raise ConfigError(
            f"{where} with {option}, and the Trainer divides batches among the workers itself. Pass batch_size, shuffle or a sampler "
            "of torch to the DataLoader instead."
        )
    pipeline = _ordered(where, loader, batches.sampler)
    # In a torchrun script, each process has a part of the batch. The Trainer's batch is the sum over all of them.
    replicas = batches.sampler.num_replicas if isinstance(batches.sampler, DistributedSampler) else 1
    return dataclasses.replace(pipeline, batch_size=batches.batch_size * replicas, drop_last=batches.drop_last)


def _ordered(where: str, loader: DataLoader[Any], sampler: Any) -> Pipeline:
    """The loader's samples in the order of its sampler."""
    if not _is_torchs(sampler):
        _refuse(where, sampler)
    dataset: Any = loader.dataset
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", dataset))
    if source is not dataset and len(source) != len(dataset):  # it draws from another set of samples
        _refuse(where, sampler)
    match sampler:
        case SequentialSampler():
            return _samples(loader, shuffle=False)
        case RandomSampler(replacement=True):
            return weighted(_samples(loader), torch.ones(len(dataset)), samples=sampler.num_samples)
        case RandomSampler() if sampler.num_samples == len(dataset):
            return _samples(loader, shuffle=True)
        # A worker_init_fn would find the Subset in place of its own data set.
        case SubsetRandomSampler() if loader.worker_init_fn is None:
            return _samples(loader, Subset(dataset, list(sampler.indices)), shuffle=True)
        case WeightedRandomSampler(replacement=True):
            return weighted(_samples(loader), sampler.weights, samples=sampler.num_samples)
        case DistributedSampler():  # the feed divides the samples
            return _samples(loader, shuffle=sampler.shuffle)
        case _:
            _refuse(where, sampler)


def _is_torchs(sampler: Any) -> bool:
    """Return whether a sampler orders as one of torch's own does. A subclass may replace that order."""
    return any(isinstance(sampler, known) and type(sampler).__iter__ is known.__iter__ for known in _KNOWN)


def _samples(loader: DataLoader[Any], dataset: Any = None, *, shuffle: bool | None = None) -> Pipeline:
    return from_torch(
        loader.dataset if dataset is None else dataset,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn if loader.num_workers else None,  # as torch does
        on_device=getattr(loader, "on_device", None),  # of an offload.DataLoader
        shuffle=shuffle,
    )


def _refuse(where: str, sampler: Any) -> NoReturn:
    options = " with these options" if _is_torchs(sampler) else ""
    raise ConfigError(
        f"{where} with the sampler {type(sampler).__name__}{options}, whose order the Trainer cannot follow: its own orders let a run "
        "resume and change its workers. Pass shuffle=True, a WeightedRandomSampler with replacement, or a Subset; or keep the sampler "
        "and iterate over an offload.DataLoader in a loop of your own."
    )
