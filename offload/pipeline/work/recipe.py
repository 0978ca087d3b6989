"""A recipe, the work of a preprocessing task, which turns index rows into a block.

It reads the samples, transforms them with reproducible randomness, and packs them. It runs in Ray Data tasks and in actors, on one
core each. Where it stops: :mod:`offload.pipeline.feed.feed` decides which rows to process, and when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from offload.errors import RunError
from offload.pipeline.blocks.values import annotation
from offload.pipeline.blocks.whole_samples import CONTENTS, SAMPLES
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Columns, is_pillow, take
from offload.pipeline.images.decode import UndecodableError
from offload.pipeline.index.mixed import in_parts
from offload.pipeline.index.rows import Picked, as_table
from offload.pipeline.index.source import Reader, Samples, nowhere
from offload.pipeline.order.chunks import CHUNK, Calls
from offload.pipeline.order.shuffling import mix
from offload.pipeline.program import pickling
from offload.pipeline.work.block import Gather, Processed, Scratch, assemble
from offload.pipeline.work.environment import Folder
from offload.pipeline.work.randomness import Drawn, Held, held_by, loaded_libraries, seed_generators
from offload.pipeline.work.watchdog import Nobody, SampleTimeoutError, Watch
from offload.pipeline.work.wording import FAILURES, Words, say

OnError = Literal["raise", "skip"]
Kind = Literal["none", "batch", "sample", "image", "generator"]
"""What a transform takes: nothing, a batch, a sample, an image; ``"generator"``: a sample, for which it yields any number of samples."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a task needs besides its rows.

    ``folder``: the program's, which must be the first field. ``transform`` may be a class; the process that runs it then constructs it.
    ``dataset``: the data set's name, for messages.
    ``sample_timeout_s``: the longest time that a sample may take. ``whole``: samples travel as they are, not as columns
    (:mod:`offload.pipeline.blocks.whole_samples`). ``seeded_by``: the column of index rows whose number seeds a sample's random numbers; it
    is the position if a pass draws samples repeatedly. ``parts``: the recipes of the data sets that were mixed, if any, and
    ``part_names`` their names. ``calls``: the size of the reader's and the transform's calls. ``held``: the generators
    of random numbers that the transform holds, once it is ready.
    """

    folder: Folder = field(default_factory=Folder.here)
    transform: Any
    kind: Kind
    seed: int
    on_error: OnError = "raise"
    reader: Reader | None = None
    dataset: str = ""
    sample_timeout_s: float | None = None
    whole: bool = False
    seeded_by: str = SAMPLE_ID
    parts: tuple[Recipe, ...] = ()
    part_names: tuple[str, ...] = ()
    calls: Calls = field(default_factory=Calls)
    held: Held = ()

    @property
    def words(self) -> Words:
        """Words for errors about its samples."""
        describe = None if self.reader is None else self.reader.describe
        name = "" if self.kind == "none" else _name(self.transform, self.kind)
        return Words(describe=describe, transform=name, dataset=self.dataset)

    def ready(self) -> Recipe:
        """Prepare this recipe in this process: construct the transform, import its libraries and limit them to one thread.

        Raises RunError for a transform class, or a factory of a data set, that raises.
        """
        transform = self.transform
        if isinstance(transform, type):
            try:
                transform = transform()
            except FAILURES as error:
                raise RunError(
                    f"the transform class {self.words.transform} raised {say(error)} when it was constructed on a "
                    "preprocessing process. Correct its constructor: it runs on every node, without arguments."
                ) from None
        _import_ahead(transform)
        if (prepare := getattr(self.reader, "prepare", None)) is not None:
            prepare()
        hold_to_one_core()
        calls = Calls()
        if self.parts or self.sample_timeout_s is not None:  # a late sample is to be found within a chunk
            calls.fix()
        parts = tuple(part.ready() for part in self.parts)
        for part in parts:
            part.calls.fix()
        return dataclasses.replace(self, transform=transform, parts=parts, calls=calls, held=held_by(transform))

    def process(self, rows: pa.Table | Picked, *, epoch: int, scratch: Scratch, watch: Watch) -> pa.Table:
        """See :func:`process`."""
        return process(self, rows, epoch=epoch, scratch=scratch, watch=watch)


def pack(recipe: Any, classes: list[type] | None = None) -> np.ndarray[Any, Any]:
    """The recipe as bytes, in an array: tasks read it in shared memory and unpickle it once per process. ``classes`` gets the classes that
    travel with it."""
    return np.frombuffer(pickling.dumps(recipe, classes), dtype=np.uint8)


_ready: dict[str, Any] = {}
_newest: dict[str, str] = {}  # the key of each owner's newest recipe


def unpack(key: str, packed: Callable[[], np.ndarray[Any, Any]], owner: str = "") -> Any:
    """The recipe ``key`` of this process, unpickled and prepared at its first use. It replaces an earlier one of the same ``owner``."""
    if key not in _ready:
        # Keep only the recipes of the newest few runs: one may hold a data set of millions of names.
        while len(_ready) >= 8:
            _ready.pop(next(iter(_ready)))
        if owner:
            _ready.pop(_newest.get(owner, ""), None)
            _newest[owner] = key
        _ready[key] = loaded(packed())
    return _ready[key]


def loaded(packed: np.ndarray[Any, Any]) -> Any:
    """The recipe, unpickled and prepared in this process."""
    return pickling.loads(packed.tobytes()).ready()


def _name(transform: Any, kind: Kind) -> str:
    if kind == "image":
        return getattr(transform, "__qualname__", None) or repr(transform)
    return str(getattr(transform, "__qualname__", type(transform).__name__))


def _import_ahead(transform: Any) -> None:
    """Import the libraries that the transform's code would import at its first run. Libraries loaded later would be neither seeded
    nor limited to one core."""
    function = transform if hasattr(transform, "__code__") or transform is None else type(transform).__call__
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    for library in ("torch", "cv2"):
        if any(name.split(".")[0] == library for name in names):
            with contextlib.suppress(ImportError):  # the transform's own import raises a better error
                importlib.import_module(library)


def hold_to_one_core() -> None:
    """Limit this process's libraries to one thread: the other cores have processes of their own."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)


def process(
    recipe: Recipe, rows: pa.Table | Picked, *, epoch: int, scratch: Scratch | None = None, watch: Watch | None = None
) -> pa.Table:
    """Return the block of these index rows, which hold ``sample_id``, ``__position__`` and the reader's own columns.

    The block omits rows marked as :data:`TRAINED`. With ``scratch``, the block lies in that memory until the next block. The process
    tells ``watch`` what it is doing. The bytes of a sample depend on the recipe's seed, the epoch and the sample, as long as chunks
    are whole.

    Raises RunError, with the name of the sample, if a sample cannot be read or takes too long under ``on_error="raise"``, or if a
    transform raises, takes too long, returns another number of rows, or returns rows that differ in shape.
    """
    if recipe.reader is None:
        raise ValueError("process needs a recipe with a reader")
    watch, table, scratch = watch or Watch(Nobody()), as_table(rows), scratch or Scratch()
    made = _processed(recipe, table, epoch, scratch, watch)
    if made is None:  # rows without seeds have drawn random numbers; all have seeds from now on
        made = _processed(recipe, table, epoch, scratch, watch)
    assert made is not None
    watch.idle()
    return assemble(*made, recipe.words, whole=recipe.whole, skip=recipe.on_error == "skip")


def _processed(
    recipe: Recipe, rows: pa.Table, epoch: int, scratch: Scratch, watch: Watch
) -> tuple[Processed, Gather] | None:
    """Return the results of a task, and what gathered them. None: the recipe has drawn random numbers for rows that had no seeds, and the
    task must begin again."""
    reader, calls = recipe.reader, recipe.calls
    assert reader is not None
    positions = rows.column(POSITION).to_numpy()
    parts: list[Columns] = []
    kept: list[np.ndarray[Any, Any]] = []
    skipped: dict[int, str] = {}
    gather = Gather(rows.num_rows, scratch)
    if (begin_pass := getattr(reader, "begin_pass", None)) is not None:
        begin_pass(recipe.seed, epoch)
    if (begin := getattr(reader, "begin", None)) is not None:
        begin(rows, epoch)
    ends = np.append(np.flatnonzero(np.diff(positions // CHUNK)) + 1, len(positions))
    start = 0
    # Since the first rows without seeds. The task looks once, at its end: a look costs as much as transforming hundreds of light rows.
    drawn: Drawn | None = None
    while start < len(positions):
        stop = calls.stop(ends, start)
        chunk = rows.slice(start, stop - start)
        libraries, began = loaded_libraries(), time.perf_counter()
        calls.begin()
        if calls.seeded:
            if drawn:
                break
            drawn = None
        elif drawn is None:
            drawn = Drawn(recipe.held)
        good, made, errors = _process_rows(recipe, chunk, epoch, watch)
        if loaded_libraries() != libraries:
            # These rows themselves imported the library of their random numbers, which was therefore not seeded.
            hold_to_one_core()
            calls.restart()
            continue
        if not calls.done(time.perf_counter() - began):
            continue
        for i, reason in errors.items():
            skipped[start + i] = f"{reader.describe(chunk, i)}: {reason}"
        if len(good):
            check_block_names(recipe, made)
            parts.append(made if recipe.whole else gather.place(made))
            kept.append(good + start)
        start = stop
    if drawn:
        calls.fix()
        return None
    return Processed(rows, parts, kept, skipped), gather


def _process_rows(
    recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch
) -> tuple[np.ndarray[Any, Any], Columns, Mapping[int, str]]:
    """Return (the rows that could be read, their transformed columns, the errors of the other rows)."""
    if recipe.parts:
        return in_parts(
            recipe.parts, chunk, lambda part, rows: _process_rows(part, rows, epoch, watch), recipe.part_names
        )
    samples = _read(recipe, chunk, epoch, watch)
    while True:
        try:
            return _transform_good(recipe, chunk, samples, epoch, watch)
        except _BrokenRow as error:
            # The source left the image to the transform. The row fails as if its reader had decoded it; the others run again.
            samples.errors[error.row] = error.reason
            _check_read(recipe, chunk, samples)


class _BrokenRow(Exception):
    """The image of this row of a chunk is missing, or cannot be decoded."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.reason = row, reason


def _transform_good(
    recipe: Recipe, chunk: pa.Table, samples: Samples, epoch: int, watch: Watch
) -> tuple[np.ndarray[Any, Any], Columns, Mapping[int, str]]:
    """Transform the rows that could be read. Raises _BrokenRow."""
    good = np.arange(chunk.num_rows)
    if samples.errors:
        good = np.delete(good, list(samples.errors))
    if not len(good):
        return good, {}, samples.errors
    columns = samples.columns if len(good) == chunk.num_rows else take(samples.columns, good)
    chunk = chunk if len(good) == chunk.num_rows else chunk.take(pa.array(good))
    try:
        made = transform(recipe, columns, ids=chunk.column(SAMPLE_ID).to_numpy(), chunk=chunk, epoch=epoch, watch=watch)
    except _BrokenRow as error:
        raise _BrokenRow(int(good[error.row]), error.reason) from None
    recipe.calls.nbytes += _nbytes(columns) + _nbytes(made)
    return good, made, samples.errors


def _read(recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch) -> Samples:
    samples = _attempt_read(recipe, chunk, epoch, watch)
    _check_read(recipe, chunk, samples)
    for name, kind in samples.annotated.items():
        _check_annotated(recipe, name, kind)
    return samples


def _check_read(recipe: Recipe, chunk: pa.Table, samples: Samples) -> None:
    """Raise RunError for a row that cannot be read, unless the user wants to skip it."""
    if samples.errors and recipe.on_error == "raise":
        row = min(samples.errors)
        reason = samples.errors[row]
        remedy = _REMEDY_STORAGE if any(code in reason for code in _OF_STORAGE) else _REMEDY_SKIP
        raise RunError(f"{recipe.words.sample(chunk, row)} is unusable: {reason}. {remedy}")


class _Place:
    """The reader's callback, which tells the watch the current row of a chunk."""

    def __init__(self, recipe: Recipe, chunk: pa.Table, watch: Watch) -> None:
        self.row: int | None = None
        self._recipe, self._chunk, self._watch = recipe, chunk, watch
        deadline_s = recipe.sample_timeout_s
        whole_s = None if deadline_s is None else deadline_s * chunk.num_rows
        watch.doing(lambda: f"reading {recipe.words.sample(chunk, None)}{recipe.words.of}", whole_s)

    def __call__(self, row: int) -> None:
        self.row = row
        recipe, chunk = self._recipe, self._chunk
        self._watch.doing(
            lambda: f"reading {recipe.words.sample(chunk, row)}{recipe.words.of}", recipe.sample_timeout_s
        )


def _attempt_read(recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch) -> Samples:
    reader = recipe.reader
    assert reader is not None
    at = _Place(recipe, chunk, watch)
    try:
        # A reader may be random too: a torch data set augments in __getitem__.
        with _seeded(recipe, epoch, chunk.column(recipe.seeded_by)[0].as_py(), 1):
            return reader.read(chunk, at)
    except RunError:
        raise
    except SampleTimeoutError:
        if recipe.sample_timeout_s is None:  # the deadline is that of a recipe around this one
            raise
        if recipe.on_error == "skip":
            known = {} if at.row is None else {at.row: _too_long(recipe)}
            return _read_one_by_one(recipe, chunk, epoch, watch, known)
        raise RunError(f"reading {recipe.words.sample(chunk, at.row)} {_too_long(recipe)}. {_REMEDY_SKIP}") from None
    except FAILURES as error:
        if recipe.on_error == "skip":
            # Perhaps no row fails any more: storage recovers, and augmentation draws other numbers.
            return _read_one_by_one(recipe, chunk, epoch, watch, {})
        row = _find_row(lambda i: reader.read(chunk.slice(i, 1), nowhere), chunk.num_rows)
        raise RunError(f"reading {recipe.words.sample(chunk, row)} raised {say(error)}. {_REMEDY_SKIP}") from None


_OF_STORAGE = tuple(
    f"AWS Error {code}" for code in ("ACCESS_DENIED", "SLOW_DOWN", "NETWORK_CONNECTION", "SERVICE_UNAVAILABLE")
)
_REMEDY_STORAGE = (
    "Check the storage, not the file: the credentials, their permission to read, and the limit of requests. The same command resumes from "
    "the last checkpoint."
)
_REMEDY_SKIP = 'Repair or remove it, or pass on_error="skip" to count it, list it in the run directory and go on.'


def _too_long(recipe: Recipe) -> str:
    return f"took longer than sample_timeout_s={recipe.sample_timeout_s:g}"


def _read_one_by_one(recipe: Recipe, chunk: pa.Table, epoch: int, watch: Watch, known: Mapping[int, str]) -> Samples:
    """Read a chunk in which some rows raise or take too long; these rows become errors, like the ``known`` ones."""
    reader = recipe.reader
    assert reader is not None
    merged: dict[str, list[Any]] = {}
    errors: dict[int, str] = dict(known)
    recipe.calls.drew = True  # each row has a seed of its own here, which only chunks repeat
    numbers = chunk.column(recipe.seeded_by).to_pylist()
    at = _Place(recipe, chunk, watch)
    for i in range(chunk.num_rows):
        values: dict[str, Any] = {}
        if i not in known:
            seed_generators(mix(recipe.seed, epoch, numbers[i], 1), recipe.held)
            at(i)
            try:
                one = reader.read(chunk.slice(i, 1), nowhere)
                if one.errors:
                    errors[i] = next(iter(one.errors.values()))
                values = {name: column[0] for name, column in one.columns.items()}
            except SampleTimeoutError:
                errors[i] = _too_long(recipe)
            except FAILURES as error:
                errors[i] = say(error)
        for name in values:
            merged.setdefault(name, [None] * i)
        for name, column in merged.items():
            column.append(values.get(name))
    return Samples(dict(merged), errors)


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
    if recipe.kind == "image" and (found := _annotated(columns)) is not None:
        _check_annotated(recipe, *found)
    if recipe.kind == "image" and chunk is not None and isinstance(images := columns["image"], list):
        # Such as a sample of a tar shard without an image: it is as unusable as one whose image is broken.
        for number, image in enumerate(images):
            if image is None:
                raise _BrokenRow(number, "it has no image")
    watch = watch or Watch(Nobody())
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
            f"{_what_it_gets(recipe, columns, error)}Correct the transform, or leave such samples out of the source."
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
    if recipe.kind == "image" and column != "image" and getattr(recipe.transform, "moves_pixels", True):
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
        with _seeded(recipe, epoch, int(numbers[0]), 2):
            return _checked(recipe.transform(dict(columns)))
    made: dict[str, list[Any]] = {}
    for i, number in enumerate(numbers.tolist()):
        begins(i)
        with _seeded(recipe, epoch, number, 3):
            sample = _sample(recipe, {name: column[i] for name, column in columns.items()})
        for name, value in sample.items():
            made.setdefault(name, []).append(value)
    return dict(made)


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
