"""Samples that a node makes once and then finds in its cache.

An inner recipe makes a sample, and its block's bytes are the cached content. Where it stops: :mod:`offload.pipeline.cached` checks what
a user caches, and :mod:`offload.pipeline.cache` keeps the contents, within its bound.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa

from offload.pipeline import whole_samples, wire
from offload.pipeline.cache import accounts
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.cache.store import Source, opened
from offload.pipeline.chunks import TRAINED
from offload.pipeline.recipe import Recipe, process
from offload.pipeline.sources.base import At, Samples, nowhere
from offload.pipeline.whole_samples import SAMPLES
from offload.pipeline.wire import ERROR, POSITION, SAMPLE_ID, Column

FORMAT = 1
"""The version of all contents: what else they depend on is in their key."""
_OF_A_PASS = (SAMPLE_ID, POSITION, TRAINED)
"""Columns of index rows that do not say what a sample is."""


class CachedSamplesReader:
    """A reader that makes samples by ``recipe``, unless this node's cache has them. The key of a sample is ``name`` and its index row."""

    def __init__(self, recipe: Recipe, spec: CacheSpec, name: str) -> None:
        self._recipe, self._spec, self._name = recipe, spec, name
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
        made: list[dict[str, Any] | None] = [self._found(key) for key in keys]
        missing = [row for row, sample in enumerate(made) if sample is None]
        errors: dict[int, str] = {}
        if missing:
            for row, block, error in self._make(rows, missing):
                if error is not None:
                    errors[row] = error
                else:
                    made[row] = self._store(keys[row], block)
        names = dict.fromkeys(name for sample in made if sample is not None for name in sample)
        columns: dict[str, Column] = {
            name: [None if sample is None else sample.get(name) for sample in made] for name in names
        }
        return Samples(columns, errors)

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
        accounts.count(cache_bytes=len(content))
        with pa.ipc.open_stream(content) as stream:
            return _sample(stream.read_all())

    def _store(self, key: str, block: pa.Table) -> dict[str, Any]:
        """The sample of a block, as the cache will give it."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, block.schema) as stream:
            stream.write_table(block)
        content = sink.getvalue().to_pybytes()
        accounts.count(storage_bytes=len(content))
        if self._source is not None:
            self._source.put(key, FORMAT, content)
        with pa.ipc.open_stream(content) as again:
            return _sample(again.read_all())


def _sample(block: pa.Table) -> dict[str, Any]:
    """The columns of a block's only row. Arrays are the caller's own, since transforms may write to them."""
    columns = wire.decode(block)
    if SAMPLES in columns:
        ((sample,),) = whole_samples.decode(columns)
        return dict(sample)
    return {
        name: np.array(column[0]) if isinstance(column, np.ndarray) else column[0] for name, column in columns.items()
    }


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
