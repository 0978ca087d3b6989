"""Samples that a node makes once and then finds in its cache.

An inner recipe makes a sample, and its block's bytes are the cached content. Where it stops: :mod:`offload.pipeline.cached` checks what
a user caches, and :mod:`offload.pipeline.cache` keeps the contents, within its bound.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import RunError
from offload.pipeline import whole_samples, wire
from offload.pipeline.annotations import annotated_parts
from offload.pipeline.cache import accounts
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.cache.store import Source, opened
from offload.pipeline.chunks import TRAINED
from offload.pipeline.recipe import Recipe, process
from offload.pipeline.sources.base import At, Samples, nowhere
from offload.pipeline.sources.from_torch import plain
from offload.pipeline.wire import ERROR, POSITION, SAMPLE_ID, Column

FORMAT = 2
"""The version of all contents: what else they depend on is in their key."""
_OF_A_PASS = (SAMPLE_ID, POSITION, TRAINED)
"""Columns of index rows that do not say what a sample is."""


class CachedSamplesReader:
    """A reader that makes samples by ``recipe``, unless this node's cache has them.

    Args:
        recipe: it makes whole samples, in any structure.
        name: the key of a sample is this name and its index row.
        one_by_one: whether samples have a deadline, so that a late one must be known.
    """

    def __init__(self, recipe: Recipe, spec: CacheSpec, name: str, *, one_by_one: bool = False) -> None:
        self._recipe, self._spec, self._name, self._one_by_one = recipe, spec, name, one_by_one
        self._ready: Recipe | None = None
        self._source: Source | None = None

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
        own = rows.select([name for name in rows.column_names if name not in _OF_A_PASS])
        keys = [_digest(self._name, json.dumps(row, default=repr)) for row in own.to_pylist()]
        samples: list[dict[str, Any] | None] = [self._found(key) for key in keys]
        missing = [row for row, sample in enumerate(samples) if sample is None]
        errors: dict[int, str] = {}
        for some in [[row] for row in missing] if self._one_by_one else filter(None, [missing]):
            at(some[0])
            for row, block, error in self._make(rows, some):
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
        """(its row, its block, its error) for each sample that the recipe makes. Raises RunError as :func:`process` does."""
        assert self._ready is not None
        wanted = rows.take(pa.array(missing))
        if TRAINED in wanted.column_names:  # the outer recipe's business
            wanted = wanted.drop_columns([TRAINED])
        block = process(self._ready, wanted, epoch=0)
        wrong = block.column(ERROR).to_pylist() if ERROR in block.column_names else [None] * len(missing)
        block = block.drop_columns([name for name in (SAMPLE_ID, POSITION, ERROR) if name in block.column_names])
        return [(row, block.slice(i, 1), wrong[i]) for i, row in enumerate(missing)]

    def _found(self, key: str) -> dict[str, Any] | None:
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
        """The sample of a block, as the cache will give it."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, block.schema) as stream:
            stream.write_table(block)
        content = sink.getvalue().to_pybytes()
        accounts.count(storage_bytes=len(content))
        if self._source is not None:
            self._source.put(key, FORMAT, content)
        return _sample(content)


def _sample(content: bytes) -> dict[str, Any]:
    """The columns of a cached sample, as they were cached. Arrays are the caller's own, since transforms may write to them."""
    with pa.ipc.open_stream(content) as stream:
        ((sample,),) = whole_samples.decode(wire.decode(stream.read_all()))
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def _column(values: list[Any], errors: Mapping[int, str]) -> Column:
    """Numbers of one type, and vectors of one length, in an array, as sources give them. Rows with errors repeat another one."""
    good = [value for row, value in enumerate(values) if row not in errors]
    if not good or not all(_like(good[0], value) for value in good):
        return values
    return np.array([good[0] if row in errors else value for row, value in enumerate(values)])


def _like(first: Any, value: Any) -> bool:
    """Whether both are numbers or vectors of numpy, of one type and length."""
    known = isinstance(value, np.generic | np.ndarray) and isinstance(first, np.generic | np.ndarray)
    return known and value.ndim < 2 and value.shape == first.shape and value.dtype == first.dtype


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
