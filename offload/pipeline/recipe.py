"""A recipe, the work of a preprocessing task, which turns index rows into a block.

It reads the samples, transforms them with reproducible randomness, and packs them. It runs in Ray Data tasks and in actors, on one
core each. Where it stops: :mod:`offload.pipeline.feed` decides which rows to process, and when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from ray import cloudpickle

from offload.errors import RunError
from offload.pipeline import whole_samples, wire
from offload.pipeline.calls import CHUNK, Calls
from offload.pipeline.gather import Gather, Scratch
from offload.pipeline.randomness import Drawn, loaded_libraries, seed_generators
from offload.pipeline.ranges import Ranges
from offload.pipeline.region_decode import UndecodableError
from offload.pipeline.shuffling import mix
from offload.pipeline.sources.base import Reader, Samples, nowhere
from offload.pipeline.sources.mixed import in_parts
from offload.pipeline.watch import Nobody, SampleTimeoutError, Watch
from offload.pipeline.whole_samples import CONTENTS, SAMPLES
from offload.pipeline.wire import ERROR, POSITION, SAMPLE_ID, Column, Columns, RaggedError, UnsendableError

TRAINED = "__trained__"
"""A column of index rows that exists where a resume cuts a chunk: True for rows that were trained before. The task processes them
with the rest of their chunk, since only a whole chunk draws the same random numbers, but does not return them."""

OnError = Literal["raise", "skip"]
Kind = Literal["none", "batch", "sample", "image", "generator"]
"""What a transform takes: nothing, a batch, a sample, an image; ``"generator"``: a sample, for which it yields any number of samples."""

FAILURES = (Exception, SystemExit)  # errors of the user's code: a process that exits would lose other samples too


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a task needs besides its rows.

    ``transform`` may be a class; the process that runs it then constructs it. ``dataset``: the data set's name, for messages.
    ``sample_timeout_s``: the longest time that a sample may take. ``whole``: samples travel as they are, not as columns
    (:mod:`offload.pipeline.whole_samples`). ``seeded_by``: the column of index rows whose number seeds a sample's random numbers; it
    is the position if a pass draws samples repeatedly. ``parts``: the recipes of the data sets that were mixed, if any, and
    ``part_names`` their names. ``calls``: the size of the reader's and the transform's calls.
    """

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
                    f"the transform class {_transform_name(self)} raised {say(error)} when it was constructed on a "
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
        return dataclasses.replace(self, transform=transform, parts=parts, calls=calls)

    def process(self, rows: pa.Table, *, epoch: int, scratch: Scratch, watch: Watch) -> pa.Table:
        """See :func:`process`."""
        return process(self, rows, epoch=epoch, scratch=scratch, watch=watch)


def pack(recipe: Any) -> np.ndarray[Any, Any]:
    """The recipe as bytes, in an array: tasks read it in shared memory and unpickle it once per process."""
    return np.frombuffer(cloudpickle.dumps(recipe), dtype=np.uint8)  # type: ignore[no-untyped-call]


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
        _ready[key] = cloudpickle.loads(packed().tobytes()).ready()
    return _ready[key]


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


def whole_chunks(positions: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    """Every position below ``n`` in the chunks of these ascending positions."""
    numbers = positions // CHUNK
    chunks = numbers[np.diff(numbers, prepend=-1) > 0]
    whole = (chunks[:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)
    return whole[whole < n]


def untrained(rows: pa.Table) -> np.ndarray[Any, Any]:
    """The numbers of the index rows that a task returns: all but those marked as :data:`TRAINED`."""
    if TRAINED not in rows.column_names:
        return np.arange(rows.num_rows)
    return np.flatnonzero(~rows.column(TRAINED).to_numpy())


def process(
    recipe: Recipe, rows: pa.Table, *, epoch: int, scratch: Scratch | None = None, watch: Watch | None = None
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
    watch = watch or Watch(Nobody())
    positions = rows.column(POSITION).to_numpy()
    parts: list[Columns] = []
    kept: list[np.ndarray[Any, Any]] = []
    skipped: dict[int, str] = {}
    gather = Gather(rows.num_rows, scratch or Scratch())
    if (begin_pass := getattr(recipe.reader, "begin_pass", None)) is not None:
        begin_pass(recipe.seed, epoch)
    if (begin := getattr(recipe.reader, "begin", None)) is not None:
        begin(rows, epoch)
    ends = np.append(np.flatnonzero(np.diff(positions // CHUNK)) + 1, len(positions))
    calls, start = recipe.calls, 0
    while start < len(positions):
        stop = calls.stop(ends, start)
        chunk = rows.slice(start, stop - start)
        libraries, began = loaded_libraries(), time.perf_counter()
        calls.begin()
        drawn = Drawn() if not calls.seeded else None
        good, made, errors = _process_rows(recipe, chunk, epoch, watch)
        calls.drew = calls.drew or bool(drawn)
        if loaded_libraries() != libraries:
            # These rows themselves imported the library of their random numbers, which was therefore not seeded.
            hold_to_one_core()
            calls.restart()
            continue
        if not calls.done(time.perf_counter() - began):
            continue
        for i, reason in errors.items():
            skipped[start + i] = f"{recipe.reader.describe(chunk, i)}: {reason}"
        if len(good):
            _check_names(recipe, made, (SAMPLE_ID, POSITION, ERROR, CONTENTS, *(() if recipe.whole else (SAMPLES,))))
            parts.append(made if recipe.whole else gather.place(made))
            kept.append(good + start)
        start = stop
    watch.idle()
    return _assemble(rows, parts, kept, skipped, recipe, gather)


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
            # The source left the decoding to the transform. The row fails as if its reader had decoded it; the others run again.
            samples.errors[error.row] = error.reason
            _check_read(recipe, chunk, samples)


class _BrokenRow(Exception):
    """The image of this row of a chunk cannot be decoded."""

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
    return samples


def _check_read(recipe: Recipe, chunk: pa.Table, samples: Samples) -> None:
    """Raise RunError for a row that cannot be read, unless the user wants to skip it."""
    if samples.errors and recipe.on_error == "raise":
        row = min(samples.errors)
        raise RunError(f"{_name(recipe, chunk, row)} is unusable: {samples.errors[row]}. {_REMEDY_SKIP}")


class _Place:
    """The reader's callback, which tells the watch the current row of a chunk."""

    def __init__(self, recipe: Recipe, chunk: pa.Table, watch: Watch) -> None:
        self.row: int | None = None
        self._recipe, self._chunk, self._watch = recipe, chunk, watch
        deadline_s = recipe.sample_timeout_s
        whole_s = None if deadline_s is None else deadline_s * chunk.num_rows
        watch.doing(lambda: f"reading {_name(recipe, chunk, None)}{_of(recipe)}", whole_s)

    def __call__(self, row: int) -> None:
        self.row = row
        recipe, chunk = self._recipe, self._chunk
        self._watch.doing(lambda: f"reading {_name(recipe, chunk, row)}{_of(recipe)}", recipe.sample_timeout_s)


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
        if recipe.on_error == "skip":
            known = {} if at.row is None else {at.row: _too_long(recipe)}
            return _read_one_by_one(recipe, chunk, epoch, watch, known)
        raise RunError(f"reading {_name(recipe, chunk, at.row)} {_too_long(recipe)}. {_REMEDY_SKIP}") from None
    except FAILURES as error:
        row = _find_row(lambda i: reader.read(chunk.slice(i, 1), nowhere), chunk.num_rows)
        if row is not None and recipe.on_error == "skip":
            return _read_one_by_one(recipe, chunk, epoch, watch, {})
        raise RunError(f"reading {_name(recipe, chunk, row)} raised {say(error)}. {_REMEDY_SKIP}") from None


_REMEDY_SKIP = 'Repair or remove it, or pass on_error="skip" to count it, list it in the run directory and go on.'


def _too_long(recipe: Recipe) -> str:
    return f"took longer than sample_timeout_s={recipe.sample_timeout_s:g}"


def _of(recipe: Recipe) -> str:
    return f" of {recipe.dataset!r}" if recipe.dataset else ""


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
            seed_generators(mix(recipe.seed, epoch, numbers[i], 1))
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
            f"the transform {_transform_name(recipe)} takes images, and the source has no column 'image': it gives "
            f"{', '.join(map(str, columns))}. Name the images' column 'image' in the source, or pass a function of a batch that transforms "
            "them."
        )
    watch = watch or Watch(Nobody())
    numbers = ids if chunk is None else chunk.column(recipe.seeded_by).to_numpy()
    at: list[int | None] = [None]

    def begins(row: int | None) -> None:
        at[0] = row
        rows, deadline_s = len(ids) if row is None else 1, recipe.sample_timeout_s
        watch.doing(
            lambda: f"the transform {_transform_name(recipe)} of {_name(recipe, chunk, row, ids)}{_of(recipe)}",
            None if deadline_s is None else deadline_s * rows,
        )

    try:
        out = _call(recipe, columns, numbers, epoch, begins)
    except SampleTimeoutError:
        raise RunError(
            f"the transform {_transform_name(recipe)} {_too_long(recipe)} on {_name(recipe, chunk, at[0], ids)}. Correct the "
            "transform, or leave such samples out of the source."
        ) from None
    except UndecodableError as error:
        assert at[0] is not None, "images are decoded one by one"
        raise _BrokenRow(at[0], str(error)) from None
    except FAILURES as error:
        row = _find_row(lambda i: _call(recipe, take(columns, [i]), numbers[i : i + 1], epoch), len(ids))
        raise RunError(
            f"the transform {_transform_name(recipe)} raised {say(error)} on {_name(recipe, chunk, row, ids)}. "
            "Correct the transform, or leave such samples out of the source."
        ) from None
    for name, column in out.items():
        try:
            rows = f"{len(column)}"
        except TypeError:  # a number, or an array without rows
            rows = f"one {type(column).__name__}"
        if rows != f"{len(ids)}":
            raise RunError(
                f"the transform {_transform_name(recipe)} got {len(ids)} rows and returned {rows} in column "
                f"{name!r}. It must return one row per input row: filter samples before the source instead."
            )
    return out


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
    seed_generators(mix(recipe.seed, epoch, number, use))
    drawn = Drawn() if calls.watching else None
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


def _check_names(recipe: Recipe, columns: Mapping[Any, Any], reserved: Sequence[str]) -> None:
    """Raise RunError for column names that are not text, or that offload uses itself."""
    for name in columns:
        if not isinstance(name, str) or name in reserved:
            problem = (
                f"is {name!r}, which offload adds itself" if name in reserved else f"is {name!r}, which is not text"
            )
            raise RunError(f"the name of a column {_made_by(recipe)} {problem}. Give it another name.")


def _nbytes(columns: Columns) -> int:
    """The size of columns in memory, about: rows of a list count as its first."""
    return sum(
        column.nbytes if isinstance(column, np.ndarray) else len(column) * _size(column[0])
        for column in columns.values()
        if len(column)
    )


def _size(value: Any) -> int:
    try:
        return int(value.nbytes)
    except Exception:  # it has none, or is a sparse tensor
        return 100


def take(columns: Columns, rows: Sequence[int] | np.ndarray[Any, Any]) -> Columns:
    """The selected rows of every column."""
    return {n: c[rows] if isinstance(c, np.ndarray) else [c[i] for i in rows] for n, c in columns.items()}


def _assemble(
    rows: pa.Table,
    parts: list[Columns],
    kept: list[np.ndarray[Any, Any]],
    skipped: dict[int, str],
    recipe: Recipe,
    gather: Gather,
) -> pa.Table:
    """Join all chunks in one block. Skipped rows stay, as copies of row 0 that carry their error: a task returns as many rows as it
    got, so no row is lost silently."""
    if recipe.whole or any(whole_samples.is_nested(column) for part in parts for column in part.values()):
        return _assemble_whole(rows, parts, kept, skipped, recipe)
    names = list(dict.fromkeys(name for part in parts for name in part))
    order = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    columns: Columns = {}
    for name in names:
        if (whole := gather.whole(name, len(order))) is not None:
            columns[name] = whole
            continue
        # A whole chunk may lack a column, such as an optional member of a tar shard.
        values = [part.get(name, [None] * len(rows_)) for part, rows_ in zip(parts, kept, strict=True)]
        columns[name] = _stacked(name, values, rows, order, recipe)
    if skipped:
        missing = np.array(sorted(skipped), dtype=np.int64)
        back = np.argsort(np.concatenate((order, missing)), kind="stable")
        fill = np.where(back < len(order), back, 0)
        columns = take(columns, fill) if len(order) else {}
    if recipe.on_error == "skip":
        columns[ERROR] = [skipped.get(i) for i in range(rows.num_rows)]
    columns[SAMPLE_ID] = rows.column(SAMPLE_ID).to_numpy()
    columns[POSITION] = rows.column(POSITION).to_numpy()
    sent = untrained(rows) if TRAINED in rows.column_names else None
    try:
        return wire.encode(columns if sent is None else take(columns, sent))
    except UnsendableError as error:
        row = error.row if sent is None else int(sent[error.row])
        raise _unsendable(error, _name(recipe, rows, row), recipe) from None


def _assemble_whole(
    rows: pa.Table, parts: list[Columns], kept: list[np.ndarray[Any, Any]], skipped: dict[int, str], recipe: Recipe
) -> pa.Table:
    """Join all chunks in one block of whole samples. Skipped rows hold no sample, and their error."""
    samples: list[list[Any]] = [[] for _ in range(rows.num_rows)]
    for part, numbers in zip(parts, kept, strict=True):
        for number, made in zip(numbers.tolist(), whole_samples.rows_of(part, len(numbers)), strict=True):
            samples[number] = made
    sent = untrained(rows)
    columns: Columns = {SAMPLE_ID: rows.column(SAMPLE_ID).to_numpy(), POSITION: rows.column(POSITION).to_numpy()}
    if recipe.on_error == "skip":
        columns[ERROR] = [skipped.get(i) for i in range(rows.num_rows)]
    block = wire.encode(take(columns, sent))
    try:
        for name, column in whole_samples.encode([samples[i] for i in sent.tolist()]).items():
            block = block.append_column(name, column)
    except UnsendableError as error:
        raise _unsendable_sample(error, _name(recipe, rows, int(sent[error.row])), recipe) from None
    return block


def _unsendable_sample(error: UnsendableError, sample: str, recipe: Recipe) -> RunError:
    return RunError(f"{sample}{_made_by(recipe, ', ')} is {error.what}: {error.instead}.")


def _stacked(name: str, parts: list[Column], rows: pa.Table, order: np.ndarray[Any, Any], recipe: Recipe) -> Column:
    try:
        parts = [_plain(name, part) for part in parts]
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) < len(parts):
            return wire.stack(name, [value for part in parts for value in part])
    except RaggedError as error:
        raise _ragged(name, error.shapes, [int(order[i]) for i in error.rows], rows, recipe) from None
    except UnsendableError as error:
        raise _unsendable(error, _name(recipe, rows, int(order[error.row])), recipe) from None
    first = 0
    for array in arrays:
        if array.shape[1:] != arrays[0].shape[1:]:
            shapes = (arrays[0].shape[1:], array.shape[1:])
            raise _ragged(name, shapes, [int(order[0]), int(order[first])], rows, recipe)
        first += len(array)
    return wire.join(parts)


def _plain(name: str, column: Any) -> Column:
    """The user's column as an array of numbers or a list of rows."""
    if not hasattr(column, "dtype"):
        return list(column)
    try:
        array = wire.as_array(column)
    except UnsendableError as error:
        raise UnsendableError(error.what, error.instead, name) from None
    return list(array) if array.dtype.hasobject else array


def _unsendable(error: UnsendableError, sample: str, recipe: Recipe) -> RunError:
    return RunError(
        f"column {error.column!r} of {sample}{_made_by(recipe, ', ')} holds {error.what}, which cannot be sent to a worker: "
        f"{error.instead}."
    )


def _made_by(recipe: Recipe, before: str = "") -> str:
    """The origin of a column, in words: the transform, or the data set."""
    if recipe.kind != "none":
        return f"{before}returned by the transform {_transform_name(recipe)}"
    return "" if before else "of the data set"


def _ragged(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], at: list[int], rows: pa.Table, recipe: Recipe
) -> RunError:
    ids = rows.column(SAMPLE_ID).to_pylist()
    who = [f"sample {ids[i]}{f' ({recipe.reader.describe(rows, i)})' if recipe.reader else ''}" for i in at]
    return RunError(
        f"column {name!r} has rows of different shapes: {shapes[0]} for {who[0]}, {shapes[1]} for {who[1]}. "
        f"{wire.REMEDY_RAGGED}"
    )


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
        made = transform(seeded, columns, ids=ids, chunk=None, epoch=epoch)
        reserved = [POSITION, ERROR, CONTENTS, *([SAMPLE_ID] if id_column not in (None, SAMPLE_ID) else [])]
        _check_names(recipe, made, reserved if recipe.whole else [*reserved, SAMPLES])
        if recipe.whole or any(map(whole_samples.is_nested, made.values())):
            return _encode_foreign_whole(recipe, made, ids, fresh, numbered=id_column is not None)
        for name, column in made.items():
            try:
                plain = _plain(name, column)
                encoded[name] = plain if isinstance(plain, np.ndarray) else wire.stack(name, plain)
            except RaggedError as error:
                raise RunError(
                    f"column {name!r} has rows of different shapes: {error.shapes[0]} for sample {ids[error.rows[0]]}, "
                    f"{error.shapes[1]} for sample {ids[error.rows[1]]}. {wire.REMEDY_RAGGED}"
                ) from None
            except UnsendableError as error:
                raise _unsendable(error, _name(recipe, None, error.row, ids), recipe) from None
    if id_column is not None:
        encoded[SAMPLE_ID] = encoded[POSITION] = ids
    try:
        return wire.encode(encoded if len(fresh) == len(ids) else take(encoded, fresh))
    except UnsendableError as error:
        raise _unsendable(error, _name(recipe, None, int(fresh[error.row]), ids), recipe) from None


def _encode_foreign_whole(
    recipe: Recipe, made: Columns, ids: np.ndarray[Any, Any], fresh: np.ndarray[Any, Any], *, numbered: bool
) -> pa.Table:
    rows = whole_samples.rows_of(made, len(ids))
    block = wire.encode({SAMPLE_ID: ids[fresh], POSITION: ids[fresh]} if numbered else {})
    try:
        encoded = whole_samples.encode([rows[i] for i in fresh.tolist()])
    except UnsendableError as error:
        raise _unsendable_sample(error, _name(recipe, None, int(fresh[error.row]), ids), recipe) from None
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


def _find_row(attempt: Callable[[int], object], rows: int) -> int | None:
    """The first row that fails by itself; None if only the whole chunk fails."""
    for i in range(rows):
        try:
            attempt(i)
        except FAILURES:
            return i
    return None


def _name(recipe: Recipe, chunk: pa.Table | None, row: int | None, ids: np.ndarray[Any, Any] | None = None) -> str:
    numbers = chunk.column(SAMPLE_ID).to_pylist() if chunk is not None else (ids.tolist() if ids is not None else [])
    described = recipe.reader.describe(chunk, row or 0) if recipe.reader is not None and chunk is not None else ""
    if row is None:
        return f"a batch of {len(numbers)} samples, {numbers[0]} to {numbers[-1]}{f' (the first is {described})' if described else ''}"
    return f"sample {numbers[row]}{f' ({described})' if described else ''}"


def _transform_name(recipe: Recipe) -> str:
    t = recipe.transform
    return (
        getattr(t, "__qualname__", None) or repr(t)
        if recipe.kind == "image"
        else getattr(t, "__qualname__", type(t).__name__)
    )


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


def say(error: BaseException) -> str:
    """``ValueError: text (augment, script.py:12)``: the error, and the user's line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ("/offload/pipeline/", "/offload/train/"))]
    # The user's line, not the line inside a library that it called.
    own = [f for f in own if not any(part in f.filename for part in _LIBRARIES)] or own
    place = f" ({own[-1].name}, {own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
