"""Finished samples that several runs need: each node makes them once, and the runs of a search take them from there.

The bytes of a chunk of samples depend on the recipe, the epoch and the chunk alone, whichever run makes them. So a preprocessing process
looks for each chunk in a cache of its node, and puts those there that it makes itself. It leaves a chunk that another process is making to
that one for a moment, and makes others meanwhile. The system releases the claim of a process that ends, however it ends.

Each epoch is a source of the cache, whose samples stay while a process works on it. Once there is no more room, those of other epochs go. A
run that is far behind then makes its own.

Where it stops: the cache belongs to a node. A sample that two nodes work on is made on both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa

from offload.pipeline.blocks.wire import POSITION
from offload.pipeline.cache import accounts
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.cache.store import CachedSource, opened
from offload.pipeline.index.rows import Picked, as_table
from offload.pipeline.order.chunks import CHUNK, TRAINED, untrained
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.processing import IndexRecipe
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.watchdog import Watch
from offload.pipeline.program import pickling

FORMAT = 1
EPOCHS = 3  # that a process keeps open: the present one, the next one, and a validation
WAIT_S = 20.0  # for a chunk that another process makes; it may hang, or have been stopped
LOOK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Where runs share finished samples.

    Args:
        spec: the cache of each node.
        search: what the runs have in common: a name of their own, since files may change from one search to the next.
    """

    spec: CacheSpec
    search: str


@dataclass(frozen=True, kw_only=True)
class SharedRecipe:
    """A recipe whose chunks are made once on each node (a :class:`offload.pipeline.pool.packed_recipe.TaskRecipe`).

    Args:
        inner: what makes samples.
        sharing: where runs share them.
        name: what the samples depend on beside the epoch and their index rows.
        sources: the epochs of the cache that this process uses, once the recipe is ready.
    """

    inner: IndexRecipe
    sharing: Sharing
    name: str
    sources: OrderedDict[int, CachedSource] = field(default_factory=OrderedDict, compare=False, repr=False)

    @classmethod
    def of(cls, inner: IndexRecipe, sharing: Sharing) -> SharedRecipe:
        """Share the samples of this recipe with those runs of the search that have an equal one."""
        return cls(inner=inner, sharing=sharing, name=fingerprint(inner))

    def ready(self) -> Self:
        """Prepare the recipe in this process."""
        return dataclasses.replace(self, inner=self.inner.ready(), sources=OrderedDict())

    def process(self, rows: pa.Table | Picked, *, epoch: int, scratch: Scratch, watch: Watch) -> pa.Table:
        """Return the block of these index rows, as ``inner`` makes it."""
        source = self._source(epoch)
        if source is None:
            return self.inner.process(rows, epoch=epoch, scratch=scratch, watch=watch)
        table = as_table(rows)
        chunks = _chunks(table)
        work = _Chunks(self, source, epoch, scratch, watch)
        blocks = [_kept(block, chunk) for block, chunk in zip(work.blocks(chunks), chunks, strict=True)]
        if any(block.schema != blocks[0].schema for block in blocks):
            # Only all rows together tell the type of a column, or which of them differ in shape.
            return self.inner.process(rows, epoch=epoch, scratch=scratch, watch=watch)
        return pa.concat_tables(blocks).combine_chunks()

    def _source(self, epoch: int) -> CachedSource | None:
        """The epoch in the cache; None if the cache cannot be used."""
        if epoch in self.sources:
            self.sources.move_to_end(epoch)
            return self.sources[epoch]
        if (store := opened(self.sharing.spec)) is None:
            return None
        try:
            source = store.source(_digest(self.sharing.search, self.name, str(epoch)))
        except OSError as error:
            store.stop(error)
            return None
        self.sources[epoch] = source
        while len(self.sources) > EPOCHS:
            self.sources.popitem(last=False)
        return source


class _Chunks:
    """The chunks of one task."""

    def __init__(self, recipe: SharedRecipe, source: CachedSource, epoch: int, scratch: Scratch, watch: Watch) -> None:
        self._recipe, self._source, self._epoch = recipe, source, epoch
        self._scratch, self._watch = scratch, watch

    def blocks(self, chunks: Sequence[pa.Table]) -> list[pa.Table]:
        """The whole block of each chunk."""
        whole = [chunk.drop_columns([TRAINED]) if TRAINED in chunk.column_names else chunk for chunk in chunks]
        of = (self._recipe.sharing.search, self._recipe.name, str(self._epoch))
        keys = [_digest(*of, json.dumps(chunk.to_pylist(), default=repr)) for chunk in whole]
        done = {at: block for at, key in enumerate(keys) if (block := self._stored(key)) is not None}
        # Where two runs make the same task at once, each begins with another chunk.
        missing = [at for at in range(len(keys)) if at not in done]
        start = os.getpid() % max(len(missing), 1)
        until = time.monotonic() + WAIT_S
        waiting = missing[start:] + missing[:start]
        while waiting:
            busy = []
            for at in waiting:
                block = self._made(whole[at], keys[at], at_any_rate=time.monotonic() > until)
                if block is None:
                    busy.append(at)
                else:
                    done[at] = block
            if len(busy) == len(waiting):
                time.sleep(LOOK_S)
            waiting = busy
        return [done[at] for at in range(len(keys))]

    def _made(self, chunk: pa.Table, key: str, *, at_any_rate: bool) -> pa.Table | None:
        """The block of a chunk: made here, or by another process meanwhile; None while another process makes it."""
        with self._source.claimed(key) as ours:
            # Between the first look and the claim, another process may have finished it.
            if (block := self._stored(key)) is not None:
                return block
            if not ours and not at_any_rate:
                return None
            recipe = self._recipe.inner
            block = recipe.process(chunk, epoch=self._epoch, scratch=self._scratch, watch=self._watch)
            content = _to_bytes(block)
            accounts.count(storage_bytes=len(content))
            self._source.put(key, FORMAT, content)
        # From its bytes, also because the scratch memory is that of the next chunk.
        return _from_bytes(content)

    def _stored(self, key: str) -> pa.Table | None:
        content = self._source.get(key, FORMAT)
        if content is None:
            return None
        accounts.count(cache_bytes=len(content))
        return _from_bytes(content)


def fingerprint(recipe: Recipe) -> str:
    """A text that is equal for recipes that make equal samples of the same rows. Equal recipes may differ in it, which costs time alone."""
    return hashlib.blake2b(pickling.content_of(_without_program(recipe)), digest_size=16).hexdigest()


def _without_program(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe, except its surroundings: each trial has a working folder of its own."""
    fields = {each.name: getattr(recipe, each.name) for each in dataclasses.fields(recipe) if each.name != "program"}
    return {**fields, "parts": tuple(map(_without_program, recipe.parts))}


def _chunks(table: pa.Table) -> list[pa.Table]:
    """The rows of each chunk."""
    positions = table.column(POSITION).to_numpy()
    ends = [*(np.flatnonzero(np.diff(positions // CHUNK)) + 1).tolist(), len(positions)]
    return [table.slice(start, end - start) for start, end in itertools.pairwise([0, *ends])]


def _kept(block: pa.Table, chunk: pa.Table) -> pa.Table:
    """Those rows of a whole chunk's block that were not trained before."""
    if TRAINED not in chunk.column_names:
        return block
    rows = untrained(chunk)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [run for run in np.split(rows, breaks) if len(run)]
    return pa.concat_tables([block.slice(int(run[0]), len(run)) for run in runs] or [block.slice(0, 0)])


def _to_bytes(block: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema) as stream:
        stream.write_table(block)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _from_bytes(content: bytes) -> pa.Table:
    with pa.ipc.open_stream(content) as stream:
        return stream.read_all()


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
