"""The user's transform, called with seeded random numbers, and its result checked.

Where it stops: :mod:`offload.pipeline.preprocessing.processing` reads what the transform gets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import FAILURES, RunError
from offload.pipeline.blocks.values import annotation
from offload.pipeline.blocks.whole_samples import CONTENTS, SAMPLES
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Columns, is_pillow, take
from offload.pipeline.images.region_decode import UndecodableError
from offload.pipeline.images.split import CpuPart
from offload.pipeline.order.shuffling import mix
from offload.pipeline.preprocessing.randomness import Drawn, seed_generators
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.watchdog import NoReports, SampleTimeoutError, Watch
from offload.pipeline.preprocessing.wording import say
from offload.pipeline.program.remedies import remedy


class _BrokenRow(Exception):
    """The image of this row of a chunk is missing, or cannot be decoded."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.reason = row, reason


def _too_long(recipe: Recipe) -> str:
    return f"took longer than sample_timeout_s={recipe.sample_timeout_s:g}"


def transform(
    recipe: Recipe,
    columns: Columns,
    *,
    ids: np.ndarray[Any, Any],
    chunk: pa.Table | None,
    epoch: int,
    watch: Watch | None = None,
) -> Columns:
    """Apply the user's transform to a chunk of samples, and check its result: as many rows as before, all of one shape."""
    if recipe.kind == "none":
        return dict(columns)
    if recipe.kind == "image" and "image" not in columns:
        raise RunError(
            f"the transform {recipe.words.transform} takes images, and the source has no column 'image': it gives "
            f"{', '.join(map(str, columns))}. Name the images' column 'image' in the source, or pass a function of a batch that transforms "
            "them."
        )
    if recipe.kind == "image" and (annotated := _annotated(columns)) is not None:
        _check_annotated(recipe, *annotated)
    if recipe.kind == "image" and chunk is not None and isinstance(images := columns["image"], list):
        # Such as a sample of a tar shard without an image: it is as unusable as one whose image is broken.
        for number, image in enumerate(images):
            if image is None:
                raise _BrokenRow(number, "it has no image")
    watch = watch or Watch(NoReports())
    numbers = ids if chunk is None else chunk.column(recipe.seeded_by).to_numpy()
    at: list[int | None] = [None]

    def begins(row: int | None) -> None:
        at[0] = row
        rows, deadline_s = len(ids) if row is None else 1, recipe.sample_timeout_s
        watch.doing(
            lambda: (
                f"the transform {recipe.words.transform} of {recipe.words.sample(chunk, row, ids)}{recipe.words.of}"
            ),
            None if deadline_s is None else deadline_s * rows,
        )

    try:
        out = _call(recipe, columns, numbers, epoch, begins)
    except SampleTimeoutError:
        if recipe.sample_timeout_s is None:
            raise
        raise RunError(
            f"the transform {recipe.words.transform} {_too_long(recipe)} on {recipe.words.sample(chunk, at[0], ids)}. Correct the "
            "transform, or leave such samples out of the source."
        ) from None
    except UndecodableError as error:
        assert at[0] is not None, "images are decoded one by one"
        raise _BrokenRow(at[0], str(error)) from None
    except FAILURES as error:
        row = _find_row(lambda i: _call(recipe, take(columns, [i]), numbers[i : i + 1], epoch), len(ids))
        raise RunError(
            f"the transform {recipe.words.transform} raised {say(error)} on {recipe.words.sample(chunk, row, ids)}. "
            f"{_what_it_gets(recipe, columns, error)}Correct the transform, or leave such samples out of the source.{remedy(error)}"
        ) from None
    for name, column in out.items():
        try:
            rows = f"{len(column)}"
        except TypeError:  # a number, or an array without rows
            rows = f"one {type(column).__name__}"
        if rows != f"{len(ids)}":
            raise RunError(
                f"the transform {recipe.words.transform} got {len(ids)} rows and returned {rows} in column "
                f"{name!r}. It must return one row per input row: filter samples before the source instead."
            )
    return out


def _what_it_gets(recipe: Recipe, columns: Columns, error: BaseException) -> str:
    """A sentence on a function's argument, where its error may come from taking that for something else, such as an image."""
    if recipe.kind == "image" or not isinstance(error, AttributeError | TypeError | LookupError):
        return ""
    what = "a batch" if recipe.kind == "batch" else "a sample"
    alone = "; transforms of torchvision and timm alone get the image" if "image" in columns else ""
    return f"It gets {what}, a dict of {', '.join(map(str, columns))}{alone}. "


def _check_annotated(recipe: Recipe, column: str, kind: str) -> None:
    """Raise RunError if the transform gets the image alone and moves its pixels: boxes and masks would no longer fit."""
    keeps_places = isinstance(recipe.transform, CpuPart) and not recipe.transform.moves_pixels
    if recipe.kind == "image" and column != "image" and not keeps_places:
        raise RunError(
            f"the transform {recipe.words.transform} gets the image alone, and column {column!r} holds {kind}, which would stay as they "
            "are. Without a cache, call it on both in the data set's own __getitem__. Or call it in a function of a sample "
            "(per_sample=True), which gets arrays: make tv_tensors of both first, since torchvision leaves arrays as they are."
        )


def _annotated(columns: Columns) -> tuple[str, str] | None:
    """(a column other than the image, the type of its annotations), judged by the first sample."""
    for name, column in columns.items():
        if name != "image" and len(column) and (kind := annotation(column[0])) is not None:
            return name, kind
    return None


def _call(
    recipe: Recipe,
    columns: Columns,
    numbers: np.ndarray[Any, Any],
    epoch: int,
    begins: Callable[[int | None], None] = lambda row: None,
) -> Columns:
    if recipe.kind == "batch":
        begins(None)
        # By the first sample: a chunk always begins with the same one.
        with _seeded(recipe, epoch, int(numbers[0]), 2):
            return _checked(recipe.transform(dict(columns)))
    transformed: dict[str, list[Any]] = {}
    for i, number in enumerate(numbers.tolist()):
        begins(i)
        with _seeded(recipe, epoch, number, 3):
            sample = _sample(recipe, {name: column[i] for name, column in columns.items()})
        for name, value in sample.items():
            transformed.setdefault(name, []).append(value)
    return dict(transformed)


def _sample(recipe: Recipe, sample: dict[str, Any]) -> dict[str, Any]:
    """The transformed sample."""
    if recipe.kind == "image":
        return {**sample, "image": recipe.transform(sample["image"])}
    if recipe.kind == "generator":
        return {SAMPLES: list(recipe.transform(sample))}
    return _checked(recipe.transform(sample))


@contextlib.contextmanager
def _seeded(recipe: Recipe, epoch: int, number: int, use: int) -> Iterator[None]:
    """Seed the generators for a sample, or for the chunk that begins with it, unless the recipe draws no random numbers. ``use`` tells
    the uses of one sample's random numbers apart."""
    calls = recipe.calls
    if not calls.seeded:
        yield
        return
    seed_generators(mix(recipe.seed, epoch, number, use), recipe.held)
    drawn = Drawn(recipe.held) if calls.watching else None
    yield
    calls.drew = calls.drew or bool(drawn)


def _checked(out: Any) -> dict[str, Any]:
    if not isinstance(out, Mapping):
        if out is None:
            raise TypeError(
                "it returned None, not a dict of columns (a generator may drop samples: yield those to keep)"
            )
        raise TypeError(f"it returned {type(out).__name__}, not a dict of columns")
    return dict(out)


def check_block_names(recipe: Recipe, columns: Mapping[Any, Any]) -> None:
    """Raise RunError for column names that are not text, or that a block uses itself."""
    check_names(recipe, columns, (SAMPLE_ID, POSITION, ERROR, CONTENTS, *(() if recipe.whole else (SAMPLES,))))


def check_names(recipe: Recipe, columns: Mapping[Any, Any], reserved: Sequence[str]) -> None:
    """Raise RunError for column names that are not text, or that offload uses itself."""
    for name in columns:
        if not isinstance(name, str) or name in reserved:
            problem = (
                f"is {name!r}, which offload adds itself" if name in reserved else f"is {name!r}, which is not text"
            )
            raise RunError(f"the name of a column {recipe.words.made_by()} {problem}. Give it another name.")


def _nbytes(columns: Columns) -> int:
    """The size of columns in memory, about: rows of a list count as its first."""
    return sum(
        column.nbytes if isinstance(column, np.ndarray) else len(column) * _size(next(iter(column)))
        for column in columns.values()
        if len(column)
    )


def _size(value: Any) -> int:
    try:
        return int(value.nbytes)
    except Exception:  # it has none, or is a sparse tensor
        return value.width * value.height * len(value.getbands()) if is_pillow(value) else 100


def _find_row(attempt: Callable[[int], object], rows: int) -> int | None:
    """The first row that fails by itself; None if only the whole chunk fails."""
    for i in range(rows):
        try:
            attempt(i)
        except FAILURES:
            return i
    return None
