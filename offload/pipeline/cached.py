"""A data set whose samples each node makes once, and then transforms anew in every epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.model.checks import check_text
from offload.pipeline.cache.spec import SANE, parse_cache
from offload.pipeline.combine import indexed
from offload.pipeline.device import ToChannelsFirst
from offload.pipeline.sources.base import Index, Tell, silent
from offload.pipeline.sources.cached_samples import CachedSamplesReader
from offload.pipeline.spec import CollateFn, Kept, OnDevice, Pipeline, build_pipeline
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
        name: the name under which later runs find the samples, such as ``"train-256"``. Each data set needs one of its own. Change it when
            the data or the code that makes the samples changes.

    Raises:
        ConfigError: for invalid options, and for a data set that draws its samples by weight, yields several samples for one, or leaves
            steps to the device that would come after ``transform``.
    """
    inner = indexed("cached", pipeline)
    spec = parse_cache("cached: cache", cache)
    if spec is None:
        raise ConfigError(f"cached: cache must be text such as {SANE}, found None.")
    check_text("cached: name", name, sane='such as "train-256"')
    _check(inner, transform, collate_fn)
    lister = inner.list
    assert lister is not None

    def listed(tell: Tell = silent) -> Index:
        index = lister(tell)
        recipe = dataclasses.replace(inner.recipe(index, seed=0), whole=True)
        of = "\0".join((name, inner.name, str(len(index)), index.identity or ""))
        reader = CachedSamplesReader(recipe, spec, of, one_by_one=sample_timeout_s is not None)
        return dataclasses.replace(index, reader=reader)

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
        kept=(*inner.kept, Kept(name=name, folder=spec.folder, made_by=inner)),
    )


def check_names(pipelines: Mapping[str, Pipeline]) -> None:
    """Raise ConfigError if two data sets would find each other's samples. ``pipelines``: those of a run, by name."""
    seen: dict[tuple[str, Path], tuple[str, Pipeline]] = {}
    for dataset, pipeline in pipelines.items():
        for kept in pipeline.kept:
            other, made_by = seen.setdefault((kept.name, kept.folder), (dataset, kept.made_by))
            if made_by is not kept.made_by:
                both = f"{other!r} and {dataset!r}" if other != dataset else f"two data sets in {dataset!r}"
                raise ConfigError(
                    f"{both} are cached under the same name {kept.name!r}, and would find each other's samples. Give each its own name."
                )


def _check(inner: Pipeline, transform: Any, collate_fn: CollateFn | None) -> None:
    """Raise ConfigError if the samples of this data set cannot be cached, or not transformed afterwards."""
    for part in inner.parts.values():
        _check(part, None, None)
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
    after = None
    if transform is not None and not _only_layout(inner):
        after = "the transform of cached"
    elif transform is None and collate_fn is not None and inner.on_device:
        after = "cached's collate_fn"
    if after is not None:
        steps = ", ".join(getattr(step, "__qualname__", None) or repr(step) for step in inner.on_device)
        raise ConfigError(
            f"the last steps of {inner.name} run on the device ({steps}), after {after}. Move them to cached's transform or on_device."
        )


def _only_layout(pipeline: Pipeline) -> bool:
    """Whether nothing happens on the device but a change of images' layout, which a later transform makes itself."""
    return all(isinstance(step, OnUint8) and isinstance(step.step, ToChannelsFirst) for step in pipeline.on_device)
