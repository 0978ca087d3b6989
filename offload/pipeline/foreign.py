"""Blocks of a ``ray.data.Dataset`` that Ray Data executes: its batches have no index rows."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
from ray import cloudpickle

from offload.errors import RunError
from offload.pipeline import whole_samples, wire
from offload.pipeline.assemble import plain, unsendable, unsendable_sample
from offload.pipeline.own_copies import own_column
from offload.pipeline.ranges import Ranges
from offload.pipeline.recipe import Recipe, check_names, transform
from offload.pipeline.shuffling import mix
from offload.pipeline.whole_samples import CONTENTS, SAMPLES
from offload.pipeline.wire import ERROR, POSITION, SAMPLE_ID, Columns, RaggedError, UnsendableError, take


def encode_foreign(
    recipe: Recipe, columns: Columns, *, id_column: str | None, done: Ranges, epoch: int = 0
) -> pa.Table:
    """Return the block of a batch of a plain ``ray.data.Dataset``, without the samples whose ids are in ``done``. Without an
    ``id_column``, the reading side numbers the samples.

    The transform processes a partly trained batch as a whole, as before: a part of it would draw other random numbers. If Ray Data
    forms other batches, the random numbers of a per-batch transform still change.
    """
    ids = np.arange(len(next(iter(columns.values()), ())), dtype=np.int64)
    seeded, fresh = recipe, np.arange(len(ids))
    if id_column is not None:
        ids = user_ids(columns, id_column) if len(ids) else ids
        fresh = np.flatnonzero(~done.holds(ids))
        if not len(fresh) or recipe.kind != "batch":
            columns, ids = take(columns, fresh), ids[fresh]
            fresh = np.arange(len(ids))
    elif len(ids) and recipe.kind != "none":
        # Rows are numbered per block, so only content tells blocks apart; it seeds their random numbers.
        first: bytes = cloudpickle.dumps({name: column[0] for name, column in columns.items()})  # type: ignore[no-untyped-call]
        seeded = dataclasses.replace(recipe, seed=mix(recipe.seed, zlib.crc32(first)))
    encoded: Columns = {}
    if len(ids):
        if recipe.kind != "none":  # it may change its samples, and Ray gives arrays that cannot be written to
            columns = {name: own_column(column) for name, column in columns.items()}
        made = transform(seeded, columns, ids=ids, chunk=None, epoch=epoch)
        reserved = [POSITION, ERROR, CONTENTS, *([SAMPLE_ID] if id_column not in (None, SAMPLE_ID) else [])]
        check_names(recipe, made, reserved if recipe.whole else [*reserved, SAMPLES])
        if recipe.whole or any(map(whole_samples.is_nested, made.values())):
            return _encode_foreign_whole(recipe, made, ids, fresh, numbered=id_column is not None)
        for name, column in made.items():
            try:
                given = plain(name, column)
                encoded[name] = given if isinstance(given, np.ndarray) else wire.stack(name, given)
            except RaggedError as error:
                raise RunError(
                    f"column {name!r} has rows of different shapes: {error.shapes[0]} for sample {ids[error.rows[0]]}, "
                    f"{error.shapes[1]} for sample {ids[error.rows[1]]}. {wire.REMEDY_RAGGED}"
                ) from None
            except UnsendableError as error:
                raise unsendable(error, recipe.words.sample(None, error.row, ids), recipe.words) from None
    if id_column is not None:
        encoded[SAMPLE_ID] = encoded[POSITION] = ids
    try:
        return wire.encode(encoded if len(fresh) == len(ids) else take(encoded, fresh))
    except UnsendableError as error:
        raise unsendable(error, recipe.words.sample(None, int(fresh[error.row]), ids), recipe.words) from None


def _encode_foreign_whole(
    recipe: Recipe, made: Columns, ids: np.ndarray[Any, Any], fresh: np.ndarray[Any, Any], *, numbered: bool
) -> pa.Table:
    rows = whole_samples.rows_of(made, len(ids))
    block = wire.encode({SAMPLE_ID: ids[fresh], POSITION: ids[fresh]} if numbered else {})
    try:
        encoded = whole_samples.encode([rows[i] for i in fresh.tolist()])
    except UnsendableError as error:
        raise unsendable_sample(error, recipe.words.sample(None, int(fresh[error.row]), ids), recipe.words) from None
    return pa.table({**{name: block.column(name) for name in block.column_names}, **encoded})


def user_ids(columns: Columns, id_column: str) -> np.ndarray[Any, Any]:
    """The ids that the user gave to samples. Raises RunError if the column does not exist, or holds other things than integers."""
    if id_column not in columns:
        raise RunError(
            f"the data set has no column {id_column!r}, which from_ray(id_column=...) names; its columns are "
            f"{', '.join(columns)}."
        )
    ids = np.asarray(columns[id_column])
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise RunError(
            f"the id_column {id_column!r} must hold integers, found {ids.dtype}: number the samples instead."
        )
    return ids.astype(np.int64)
