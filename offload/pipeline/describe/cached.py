"""A data set whose samples each node makes once, and then transforms anew in every epoch.

An inner recipe makes a sample, and its block's bytes are the cached content. Where it stops: :mod:`offload.pipeline.cache` keeps the
contents, within its bound.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import ConfigError, RunError
from offload.model.checks import check_text
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.values import annotated_parts
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Column
from offload.pipeline.cache import accounts
from offload.pipeline.cache.spec import SANE, CacheSpec, parse_cache
from offload.pipeline.cache.store import CachedSource, opened
from offload.pipeline.describe.combine import indexed
from offload.pipeline.describe.pipeline import CachedAs, CollateFn, OnDevice, Pipeline, build_pipeline
from offload.pipeline.images.on_device import ToChannelsFirst
from offload.pipeline.images.split import OnUint8
from offload.pipeline.index.source import At, Index, Reader, Samples, Tell, nowhere, silent
from offload.pipeline.order.chunks import TRAINED
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.sources.from_torch import plain

FORMAT = 2
"""The version of all contents: what else they depend on is in their key."""
_OF_A_PASS = (SAMPLE_ID, POSITION, TRAINED)
"""Columns of index rows that differ from pass to pass, so they are no part of a key."""


class CachedSamplesReader(Reader):
    """A reader that makes samples by ``recipe``, unless this node's cache has them.

    Args:
        recipe: it makes whole samples, in any structure.
        name: the data set's part of a key. The other part is the sample's index row.
        one_by_one: whether samples have a deadline, so that a late one must be known.
    """

    def __init__(self, recipe: Recipe, spec: CacheSpec, name: str, *, one_by_one: bool = False) -> None:
        self._recipe, self._spec, self._name, self._one_by_one = recipe, spec, name, one_by_one
        self._ready: Recipe | None = None
        self._source: CachedSource | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None, "_source": None}

    def prepare(self) -> None:
        """Prepare the recipe, and open the cache. A cache that cannot be used costs time alone."""
        self._ready = self._recipe.ready()
        if (store := opened(self._spec)) is not None:
            try:
                self._source = store.source(_digest(self._name))
            except OSError as error:
                store.stop(error)

    def begin(self, rows: pa.Table, epoch: int) -> None:
        """Begin a task over these index rows."""
        if self._ready is None:
            self.prepare()
        if self._source is not None:
            self._source.begin(epoch)

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        if self._ready is None:
            self.prepare()
        # A sample's key must not depend on its place in a pass.
        own = rows.select([name for name in rows.column_names if name not in _OF_A_PASS])
        keys = [_digest(self._name, json.dumps(row, default=repr)) for row in own.to_pylist()]
        samples: list[dict[str, Any] | None] = [self._lookup(key) for key in keys]
        missing = [row for row, sample in enumerate(samples) if sample is None]
        errors: dict[int, str] = {}
        for batch in [[row] for row in missing] if self._one_by_one else filter(None, [missing]):
            at(batch[0])
            for row, block, error in self._make(rows, batch):
                if error is not None:
                    errors[row] = error.removeprefix(f"{self.describe(rows, row)}: ")
                else:
                    samples[row] = self._store(keys[row], block)
        good = [sample for sample in samples if sample is not None]
        columns: dict[str, Column] = {
            name: _column(
                [None if sample is None else plain(sample.get(name), colours=name == "image") for sample in samples],
                errors,
            )
            for name in dict.fromkeys(name for sample in good for name in sample)
        }
        return Samples(columns, errors, annotated=annotated_parts(good[0]) if good else {})

    def describe(self, rows: pa.Table, row: int) -> str:
        reader = self._recipe.reader
        assert reader is not None
        return reader.describe(rows, row)

    def _make(self, rows: pa.Table, missing: list[int]) -> list[tuple[int, pa.Table, str | None]]:
        """Make the missing samples. Return (row, block, error) for each. Raises RunError as :func:`process` does."""
        assert self._ready is not None
        wanted = rows.take(pa.array(missing))
        if TRAINED in wanted.column_names:  # the outer recipe leaves trained rows out
            wanted = wanted.drop_columns([TRAINED])
        # The same epoch for ever: what the inner recipe makes must not change from epoch to epoch.
        block = process(self._ready, wanted, epoch=0)
        wrong = block.column(ERROR).to_pylist() if ERROR in block.column_names else [None] * len(missing)
        block = block.drop_columns([name for name in (SAMPLE_ID, POSITION, ERROR) if name in block.column_names])
        return [(row, block.slice(i, 1), wrong[i]) for i, row in enumerate(missing)]

    def _lookup(self, key: str) -> dict[str, Any] | None:
        """The cached sample under this key. None if there is none, or if it cannot be loaded any more."""
        content = None if self._source is None else self._source.get(key, FORMAT)
        if content is None:
            return None
        try:
            sample = _sample(content)
        except (RunError, pa.ArrowException):  # it holds an object of a class that has changed since
            return None
        accounts.count(cache_bytes=len(content))
        return sample

    def _store(self, key: str, block: pa.Table) -> dict[str, Any]:
        """Cache a sample's block. Return the sample as later reads of the cache will."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, block.schema) as stream:
            stream.write_table(block)
        content = sink.getvalue().to_pybytes()
        accounts.count(storage_bytes=len(content))
        if self._source is not None:
            self._source.put(key, FORMAT, content)
        # Decoded again from its bytes, so that the first epoch sees just what later ones read.
        return _sample(content)


def _sample(content: bytes) -> dict[str, Any]:
    """The columns of a cached sample, as they were cached. Arrays are the caller's own, since transforms may write to them."""
    with pa.ipc.open_stream(content) as stream:
        ((sample,),) = whole_samples.decode(wire.decode(stream.read_all()))
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def _column(values: list[Any], errors: Mapping[int, str]) -> Column:
    """Return one array for numbers of one type or vectors of one length, as sources do, and else the list.

    A row with an error repeats the first good value, so that its place in the array is filled.
    """
    good = [value for row, value in enumerate(values) if row not in errors]
    if not good or not all(_like(good[0], value) for value in good):
        return values
    return np.array([good[0] if row in errors else value for row, value in enumerate(values)])


def _like(first: Any, value: Any) -> bool:
    """Return whether both are NumPy numbers or vectors of one type and length."""
    known = isinstance(value, np.generic | np.ndarray) and isinstance(first, np.generic | np.ndarray)
    return known and value.ndim < 2 and value.shape == first.shape and value.dtype == first.dtype


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


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
        # With a seed of its own, not the run's: later runs find the same samples.
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
        kept=(*inner.kept, CachedAs(name=name, folder=spec.folder, made_by=inner)),
    )


def check_names(pipelines: Mapping[str, Pipeline]) -> None:
    """Raise ConfigError if two data sets would find each other's samples. ``pipelines``: the run's data sets by name."""
    seen: dict[tuple[str, Path], tuple[str, Pipeline]] = {}
    for dataset, pipeline in pipelines.items():
        for entry in pipeline.kept:
            other, made_by = seen.setdefault((entry.name, entry.folder), (dataset, entry.made_by))
            if made_by is not entry.made_by:
                both = f"{other!r} and {dataset!r}" if other != dataset else f"two data sets in {dataset!r}"
                raise ConfigError(
                    f"{both} are cached under the same name {entry.name!r}, and would find each other's samples. Give each its own name."
                )


def _check(inner: Pipeline, transform: Any, collate_fn: CollateFn | None) -> None:
    """Raise ConfigError if the samples of this data set cannot be cached, or cannot be transformed after caching."""
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
    """Return whether the device only changes the layout of images, which a later transform does itself."""
    return all(isinstance(step, OnUint8) and isinstance(step.step, ToChannelsFirst) for step in pipeline.on_device)
