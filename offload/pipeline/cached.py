"""A data set whose samples each node makes once, and then transforms anew in every epoch."""

from __future__ import annotations

import dataclasses
from typing import Any

from offload.errors import ConfigError
from offload.model.checks import check_text
from offload.pipeline.cache.spec import SANE, parse_cache
from offload.pipeline.combine import indexed
from offload.pipeline.device import ToChannelsFirst
from offload.pipeline.sources.base import Index, Tell, silent
from offload.pipeline.sources.cached_samples import CachedSamplesReader
from offload.pipeline.spec import CollateFn, OnDevice, Pipeline, build_pipeline
from offload.pipeline.split import OnUint8


def cached(
    pipeline: Any,
    transform: Any = None,
    *,
    cache: str,
    name: str,
    per_sample: bool = False,
    collate_fn: CollateFn | None = None,
    on_device: OnDevice | None = None,
    sample_timeout_s: float | None = None,
) -> Pipeline:
    """A data set whose finished samples stay on each node's disk: the expensive part of preprocessing that has no randomness runs once.

    ``pipeline`` makes a sample, with its own transform. Later epochs, and later runs with the same ``name``, find it in the node's cache.
    ``transform`` then changes it anew in every epoch, such as by random crops. Each node has a cache of its own, so each node that works on
    a sample makes it once.

    Args:
        pipeline: a result of :func:`offload.image_folder` and its siblings, a ``ray.data.Dataset``, a map-style torch data set, or a list
            of samples. What it makes of a sample must not depend on random numbers: nodes would keep different results for good.
        transform, per_sample, collate_fn, on_device, sample_timeout_s: as in :func:`offload.image_folder`, for what ``pipeline`` makes.
        cache: ``"ssd:/mnt/nvme/cache:200GB"``: a folder that each node has, and the most bytes there.
        name: the name under which later runs find the samples, such as ``"resize-256"``. Give another one when the data or the code that
            makes the samples changes.

    Raises:
        ConfigError: for invalid options, and for a data set that draws its samples by weight, yields several samples for one, or leaves
            steps to the device that would come after ``transform``.
    """
    inner = indexed("cached", pipeline)
    spec = parse_cache("cached: cache", cache)
    if spec is None:
        raise ConfigError(f"cached: cache must be text such as {SANE}, found None.")
    check_text("cached: name", name, sane='such as "resize-256"')
    _check(inner, transform)
    lister = inner.list
    assert lister is not None

    def listed(tell: Tell = silent) -> Index:
        index = lister(tell)
        recipe = inner.recipe(index, seed=0)
        return dataclasses.replace(index, reader=CachedSamplesReader(recipe, spec, f"{name}\0{inner.name}"))

    outer = build_pipeline(
        f"cached({inner.name})",
        listed,
        transform,
        per_sample=per_sample,
        collate_fn=collate_fn,
        on_device=on_device,
        on_error=inner.on_error,
        shuffle=inner.shuffle,
        sample_timeout_s=sample_timeout_s,
        cache=spec,
    )
    return dataclasses.replace(
        outer,
        on_device=outer.on_device if transform is not None else (*inner.on_device, *outer.on_device),
        notes=(*inner.notes, *outer.notes),
        aside=inner.aside,
        caches=(*inner.caches, *outer.caches),
    )


def _check(inner: Pipeline, transform: Any) -> None:
    """Raise ConfigError if the samples of this data set cannot be cached, or not transformed afterwards."""
    if inner.drawn:
        raise ConfigError(
            f"{inner.name} draws its samples by weight. Cache the samples and draw from them: weighted(cached(...), weights)."
        )
    if inner.kind == "generator":
        raise ConfigError(
            f"the transform of {inner.name} yields any number of samples for one, and a cache holds one. Pass the generator to cached as "
            "its transform."
        )
    if inner.collate_fn is not None:
        raise ConfigError(f"{inner.name} has a collate_fn, which gets the samples after cached. Pass it to cached.")
    if inner.sample_timeout_s is not None:
        raise ConfigError(f"{inner.name} has a sample_timeout_s. Pass it to cached, which makes the samples.")
    if transform is not None and not _only_layout(inner):
        steps = ", ".join(getattr(step, "__qualname__", None) or repr(step) for step in inner.on_device)
        raise ConfigError(
            f"the last steps of {inner.name} run on the device ({steps}), after the transform of cached. Move them to the end of that "
            "transform, or to cached's on_device."
        )


def _only_layout(pipeline: Pipeline) -> bool:
    """Whether nothing happens on the device but a change of images' layout, which a later transform makes itself."""
    return all(isinstance(step, OnUint8) and isinstance(step.step, ToChannelsFirst) for step in pipeline.on_device)
